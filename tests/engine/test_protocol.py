import pytest

from engine import protocol
from schemas.errors import EngineError, Failure, FailureCode, Stage
from schemas.inference import (
    EngineInfo,
    EngineSettings,
    EngineStats,
    InferenceOutput,
    InferenceRequest,
    ModelSettings,
    RequestTiming,
    SamplingParams,
    TokenLogprobs,
)


def over_the_wire(message: protocol.Message) -> protocol.Message:
    (payload,) = protocol.FrameReader().feed(protocol.encode_frame(message))
    return protocol.decode_message(payload)


def test_requests_arrive_as_they_were_sent() -> None:
    sampling = SamplingParams(max_tokens=3, temperature=0.5, stop=("\n", "é"), stop_token_ids=(7,), seed=2**62)
    requests = [
        InferenceRequest(1, (1, 2, 2**31 - 1), sampling, seed=2**63 - 1, block_hashes=(b"a" * 16, b"b" * 16)),
        InferenceRequest(2**40, (), SamplingParams(), seed=0, kind="classify", label_token_ids=((1,), (2, 3))),
        InferenceRequest(3, (5,), sampling, seed=1, priority=-10),
    ]
    assert protocol.decode_requests(over_the_wire(protocol.encode_requests(requests))) == requests


def test_equal_sampling_of_a_frame_is_sent_once() -> None:
    sampling = SamplingParams()
    message = protocol.encode_requests([InferenceRequest(i, (1,), sampling, seed=0) for i in range(10)])
    assert len(message[1]) == 1


def test_outputs_arrive_as_they_were_sent() -> None:
    outputs = [
        InferenceOutput(
            1,
            token_ids=(4, 5),
            text="a \N{GRINNING FACE} \udc80",  # a lone surrogate must not break the frame of its neighbours
            finish_reason="stop",
            stop_reason="\n",
            label_id=0,
            logprobs=(TokenLogprobs(4, -0.5, (4, 9), (-0.5, -1.25)), TokenLogprobs(5, float("-inf"))),
            num_prompt_tokens=10,
            num_cached_tokens=8,
            num_preemptions=2,
            timing=RequestTiming(1.5, 2.5, 3.5),
        ),
        InferenceOutput(2, stop_reason=151645, finish_reason="length", logprobs=()),
        InferenceOutput(3, failure=Failure(FailureCode.NUMERIC_ERROR, Stage.ENGINE, "NaN")),
    ]
    assert protocol.decode_outputs(over_the_wire(protocol.encode_outputs(outputs))) == outputs


def test_settings_info_and_stats_arrive_as_they_were_sent() -> None:
    model, engine = ModelSettings(path="m", max_model_len=5), EngineSettings(block_size=32)
    assert protocol.decode_settings(over_the_wire(protocol.hello_with_settings(model, engine))) == (model, engine)
    info = EngineInfo("m", b"\x00\xff", "w", 10, 20, 16, 320, "cpu", {"weights": 1.5})
    assert protocol.decode_info(over_the_wire(protocol.ready(info))) == info
    stats = EngineStats(num_steps=3, num_free_blocks=7, step_seconds={"forward": 0.25})
    assert protocol.decode_stats(over_the_wire(protocol.encode_stats(stats))) == stats


def test_frames_are_cut_wherever_the_stream_was() -> None:
    stream = b"".join(protocol.encode_frame((kind, "x" * kind)) for kind in range(5))
    reader = protocol.FrameReader()
    payloads = [payload for byte in stream for payload in reader.feed(bytes([byte]))]
    assert [protocol.decode_message(payload) for payload in payloads] == [(kind, "x" * kind) for kind in range(5)]


@pytest.mark.parametrize("garbage", [b"\xff" * 8, b"\x01\x00\x00\x00\xc1", b"\x01\x00\x00\x00\x05"])
def test_garbage_is_an_engine_error(garbage: bytes) -> None:
    with pytest.raises(EngineError):
        [protocol.decode_message(payload) for payload in protocol.FrameReader().feed(garbage)]


def test_another_version_is_named() -> None:
    with pytest.raises(EngineError, match="speaks protocol 99, this one 2"):
        protocol.check_version((protocol.MessageKind.HELLO, 99))
    with pytest.raises(EngineError, match="not a hello"):
        protocol.check_version((protocol.MessageKind.STATS, 1))
