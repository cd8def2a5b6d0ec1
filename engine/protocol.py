"""What goes over the socket between the worker and the engine process. Knows frames and encodings, not who sends.

A frame is a little-endian uint32 length and that many bytes of msgpack: a tuple whose first element is its kind. The
first frame each way is a hello with the protocol's version. Requests and outputs go hundreds to a frame, as tuples
without names, token ids as raw int32, and each distinct SamplingParams once a frame: tens of thousands a second pass
here on one core. Both ends run on one machine, so the bytes are in its own order.
"""

from array import array
from collections.abc import Sequence
from dataclasses import asdict, fields
from enum import IntEnum
from typing import Any

import msgpack

from schemas.errors import EngineError, Failure, FailureCode, Stage
from schemas.inference import (
    EngineInfo,
    EngineSettings,
    EngineStats,
    FinishReason,
    InferenceOutput,
    InferenceRequest,
    Kind,
    ModelSettings,
    RequestTiming,
    SamplingParams,
    TokenLogprobs,
)

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 1 << 30  # a longer one is not ours: the stream is garbage
REQUESTS_PER_FRAME = 512
RECEIVE_BYTES = 1 << 20

_LENGTH_BYTES = 4
_KINDS: tuple[Kind, ...] = ("generate", "classify")
_FINISH_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length", "abort")
_KIND_INDEX = {kind: index for index, kind in enumerate(_KINDS)}
_FINISH_INDEX = {reason: index for index, reason in enumerate(_FINISH_REASONS)}


class MessageKind(IntEnum):
    """First element of every message. 0 to 9: worker to engine; from 10: engine to worker; HELLO goes both ways."""

    HELLO = 0  # version; from the worker with (model settings, engine settings)
    SUBMIT = 1  # (distinct sampling params, requests)
    ABORT = 2  # request ids
    EXPECT = 3  # longest output -> prompt tokens of what is yet to come; None: nobody knows
    PROGRESS = 10  # part of start-up, fraction of it done
    READY = 11  # EngineInfo
    OUTPUTS = 12  # outputs
    STATS = 13  # EngineStats
    HEARTBEAT = 14  # seconds that the present step has run; 0 when idle
    FATAL = 15  # name of the exception's class among ours, sentence


Message = tuple[Any, ...]


def encode_frame(message: Message) -> bytes:
    """The message's frame, length first."""
    payload: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    if len(payload) > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {len(payload)} bytes is over the {MAX_FRAME_BYTES} that a frame holds")
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def decode_message(payload: bytes) -> Message:
    """The message of a frame's payload; raises EngineError where it is not one."""
    try:
        message = msgpack.unpackb(payload, use_list=False, strict_map_key=False, unicode_errors="surrogatepass")
    except Exception as error:  # msgpack raises half a dozen unrelated kinds on garbage
        raise EngineError(f"a frame of {len(payload)} bytes is not msgpack: {error}") from error
    if not isinstance(message, tuple) or not message or not isinstance(message[0], int):
        raise EngineError(f"a frame of {len(payload)} bytes holds no message of ours")
    return message


class FrameReader:
    """Cuts a stream of bytes into frames' payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[bytes]:
        """The payloads completed by these bytes; raises EngineError on a length that cannot be ours."""
        buffer = self._buffer
        buffer += received
        payloads = []
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            length = int.from_bytes(buffer[start : start + _LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise EngineError(f"a frame says it is {length} bytes long; at most {MAX_FRAME_BYTES}")
            end = start + _LENGTH_BYTES + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + _LENGTH_BYTES : end]))
            start = end
        del buffer[:start]
        return payloads


def check_version(message: Message) -> None:
    """Raises EngineError unless the message is a hello of our version."""
    if message[0] != MessageKind.HELLO or len(message) < 2:
        raise EngineError(f"the first message is of kind {message[0]}, not a hello")
    if message[1] != PROTOCOL_VERSION:
        raise EngineError(f"the other side speaks protocol {message[1]}, this one {PROTOCOL_VERSION}: mixed versions?")


# ---- start-up: once a process, so names are sent


def hello_with_settings(model: ModelSettings, engine: EngineSettings) -> Message:
    return MessageKind.HELLO, PROTOCOL_VERSION, asdict(model), asdict(engine)


def decode_settings(message: Message) -> tuple[ModelSettings, EngineSettings]:
    return ModelSettings(**message[2]), EngineSettings(**message[3])


def ready(info: EngineInfo) -> Message:
    return MessageKind.READY, asdict(info)


def decode_info(message: Message) -> EngineInfo:
    return EngineInfo(**message[1])


# ---- requests


def encode_requests(requests: Sequence[InferenceRequest]) -> Message:
    """One SUBMIT message. Tasks share their SamplingParams, so equal objects are sent once."""
    params: list[tuple[Any, ...]] = []
    index_of: dict[int, int] = {}  # id of the object, alive as long as `requests` -> index into params
    rows = []
    for request in requests:
        sampling = request.sampling
        index = index_of.get(id(sampling))
        if index is None:
            index = index_of[id(sampling)] = len(params)
            params.append(tuple(getattr(sampling, name) for name in _SAMPLING_FIELDS))
        hashes = request.block_hashes
        rows.append(
            (
                request.request_id,
                array("i", request.token_ids).tobytes(),
                index,
                request.seed,
                _KIND_INDEX[request.kind],
                len(hashes[0]) if hashes else 0,
                b"".join(hashes),
                request.label_token_ids,
                request.priority,
            )
        )
    return MessageKind.SUBMIT, params, rows


def decode_requests(message: Message) -> list[InferenceRequest]:
    params = [SamplingParams(*values) for values in message[1]]
    return [
        InferenceRequest(
            request_id,
            _ints(token_bytes),
            params[index],
            seed,
            _KINDS[kind],
            tuple([joined[i : i + size] for i in range(0, len(joined), size)]) if size else (),
            labels,
            priority,
        )
        for request_id, token_bytes, index, seed, kind, size, joined, labels, priority in message[2]
    ]


# ---- outputs


def encode_outputs(outputs: Sequence[InferenceOutput]) -> Message:
    return MessageKind.OUTPUTS, [
        (
            output.request_id,
            array("i", output.token_ids).tobytes(),
            output.text,
            _FINISH_INDEX[output.finish_reason],
            output.stop_reason,
            output.label_id,
            None if output.logprobs is None else _encode_logprobs(output.logprobs),
            output.num_prompt_tokens,
            output.num_cached_tokens,
            output.num_preemptions,
            output.timing,
            None if (f := output.failure) is None else (f.code.value, f.stage.value, f.message),
        )
        for output in outputs
    ]


def decode_outputs(message: Message) -> list[InferenceOutput]:
    return [
        InferenceOutput(
            request_id,
            _ints(token_bytes),
            text,
            _FINISH_REASONS[finish],
            stop_reason,
            label_id,
            None if logprobs is None else _decode_logprobs(logprobs),
            num_prompt,
            num_cached,
            num_preemptions,
            RequestTiming(*timing),
            None if failure is None else Failure(FailureCode(failure[0]), Stage(failure[1]), failure[2]),
        )
        for (
            request_id,
            token_bytes,
            text,
            finish,
            stop_reason,
            label_id,
            logprobs,
            num_prompt,
            num_cached,
            num_preemptions,
            timing,
            failure,
        ) in message[1]
    ]


def encode_stats(stats: EngineStats) -> Message:
    return MessageKind.STATS, tuple(getattr(stats, name) for name in _STATS_FIELDS)


def decode_stats(message: Message) -> EngineStats:
    return EngineStats(*message[1])


_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
_STATS_FIELDS = tuple(field.name for field in fields(EngineStats))


def _ints(raw: bytes) -> tuple[int, ...]:
    values = array("i")
    values.frombytes(raw)
    return tuple(values)


def _encode_logprobs(logprobs: Sequence[TokenLogprobs]) -> Message:
    return tuple(
        (one.token_id, one.logprob, array("i", one.top_token_ids).tobytes(), array("d", one.top_logprobs).tobytes())
        for one in logprobs
    )


def _decode_logprobs(packed: Message) -> tuple[TokenLogprobs, ...]:
    def doubles(raw: bytes) -> tuple[float, ...]:
        values = array("d")
        values.frombytes(raw)
        return tuple(values)

    return tuple(TokenLogprobs(token_id, logprob, _ints(ids), doubles(top)) for token_id, logprob, ids, top in packed)
