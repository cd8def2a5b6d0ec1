"""The engine process: `python -m engine.process FD`. Knows its socket and its engine's face, not the model.

The main thread steps; the socket's thread reads, so that messages are taken in while a step runs, the worker never
blocks on a full socket, and a closed one ends the process at once, a step's end or not. Nobody else ends it: SIGINT
and SIGTERM are the worker's to act on.
"""

import contextlib
import gc
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol

from engine import protocol
from engine.lifetime import die_with_parent
from engine.protocol import Message, MessageKind
from schemas.errors import EngineError, PagemillError
from schemas.inference import (
    EngineInfo,
    EngineSettings,
    EngineStats,
    InferenceOutput,
    InferenceRequest,
    ModelSettings,
)

HEARTBEAT_SECONDS = 1.0
STATS_SECONDS = 0.25  # while busy; going idle always sends them, and so does a step that begins requests


class ServedEngine(Protocol):
    """What the process asks of an engine. A request refused on entry surfaces in the next step's outputs."""

    def add_request(self, request: InferenceRequest) -> None: ...
    def expect(self, beyond: Mapping[int, int] | None) -> None: ...
    def abort(self, request_ids: Iterable[int]) -> None: ...
    def step(self) -> list[InferenceOutput]: ...
    def has_unfinished(self) -> bool: ...
    def check_idle(self) -> None: ...
    def stats(self) -> EngineStats: ...


Progress = Callable[[str, float], None]  # part of start-up, fraction of it done
Fail = Callable[[BaseException], object]  # ends the process, from any thread, with the error as its last words
LoadEngine = Callable[[ModelSettings, EngineSettings, Progress, Fail], tuple[ServedEngine, EngineInfo]]


class WorkerConnection:
    """The engine's end of the socket: frames come in on a thread of their own, go out from any.

    That thread also beats: a beat says that the process runs, and for how long its present step has.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[bytes | EngineError] = queue.SimpleQueue()
        self._step_started: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._receive, name="engine-socket", daemon=True).start()

    def send(self, *messages: Message) -> None:
        """Blocks while the worker does not read; it then has more than it can take. Ends the process if it is gone."""
        frames = b"".join([protocol.encode_frame(message) for message in messages])
        with self._send_lock:
            try:
                self._sock.sendall(frames)
            except ConnectionError:
                _leave()

    def receive(self, wait: bool) -> list[Message]:
        """What has come in; with `wait`, at least one message."""
        messages = [self._next()] if wait else []
        while not self._inbox.empty():
            messages.append(self._next())
        return messages

    def _next(self) -> Message:
        received = self._inbox.get()
        if isinstance(received, EngineError):
            raise received
        return protocol.decode_message(received)

    def step_started(self) -> None:
        self._step_started = time.monotonic()

    def step_ended(self) -> None:
        self._step_started = None

    def _receive(self) -> None:
        reader = protocol.FrameReader()
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        next_beat = time.monotonic() + HEARTBEAT_SECONDS
        while True:
            if poller.poll(max(0.0, next_beat - time.monotonic()) * 1000):
                try:
                    received = self._sock.recv(protocol.RECEIVE_BYTES)
                except ConnectionError:
                    received = b""
                if not received:
                    _leave()
                try:
                    for payload in reader.feed(received):
                        self._inbox.put(payload)
                except EngineError as error:
                    self._inbox.put(error)
                    return  # where frames begin is lost: nothing more can be read
            if time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + HEARTBEAT_SECONDS

    def _beat(self) -> None:
        # Never waits: reading must go on. A send in progress, or a full socket, shows that we live as well as a beat.
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            writable = select.poll()
            writable.register(self._sock, select.POLLOUT)
            if writable.poll(0):
                started = self._step_started
                age = 0.0 if started is None else time.monotonic() - started
                self._sock.sendall(protocol.encode_frame((MessageKind.HEARTBEAT, age)))
        except OSError:
            _leave()
        finally:
            self._send_lock.release()


def _leave() -> NoReturn:
    """The worker is gone, as whoever sees it first says: nobody wants what the step computes, nor a word of why."""
    os._exit(0)


def serve(connection: WorkerConnection, engine: ServedEngine) -> None:
    """Take in, step, give out; for ever. Raises what a step raises, or a look at the engine once it is idle."""
    next_stats = 0.0
    num_begun_tokens = 0
    while True:
        for message in connection.receive(wait=not engine.has_unfinished()):
            _carry_out(message, engine)
        connection.step_started()
        outputs = engine.step()
        connection.step_ended()
        now = time.monotonic()
        stats = engine.stats()
        # What has begun makes room in the queue: the worker is to fill it before the next step but one is planned.
        if now >= next_stats or stats.num_begun_tokens != num_begun_tokens or not engine.has_unfinished():
            connection.send(protocol.encode_stats(stats), protocol.encode_outputs(outputs))
            next_stats = now + STATS_SECONDS
            num_begun_tokens = stats.num_begun_tokens
        elif outputs:
            connection.send(protocol.encode_outputs(outputs))
        if not engine.has_unfinished():
            engine.check_idle()  # last: what it has answered has been sent, and is not suspected of its end


def _carry_out(message: Message, engine: ServedEngine) -> None:
    if message[0] == MessageKind.SUBMIT:
        for request in protocol.decode_requests(message):
            engine.add_request(request)
    elif message[0] == MessageKind.ABORT:
        engine.abort(message[1])
    elif message[0] == MessageKind.EXPECT:
        engine.expect(message[1])
    else:
        raise EngineError(f"a message of kind {message[0]} came to the engine, which takes requests and aborts")


def run(descriptor: int, load: LoadEngine) -> int:
    """The process's life on the inherited socket; returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    connection = WorkerConnection(socket.socket(fileno=descriptor))
    connection.start()
    try:
        hello, *early = connection.receive(wait=True)
        connection.send((MessageKind.HELLO, protocol.PROTOCOL_VERSION))
        protocol.check_version(hello)
        model, settings = protocol.decode_settings(hello)
        engine, info = load(
            model,
            settings,
            lambda part, fraction: connection.send((MessageKind.PROGRESS, part, fraction)),
            lambda error: _fail(connection, error),
        )
        gc.collect()
        gc.freeze()  # what loading made lives as long as the process: collections need not look at it
        connection.send(protocol.ready(info))
        for message in early:
            _carry_out(message, engine)
        serve(connection, engine)
    except BaseException as error:
        _tell_why(connection, error)
    return 1


def _tell_why(connection: WorkerConnection, error: BaseException) -> None:
    if isinstance(error, PagemillError):
        name, sentence = type(error).__name__, str(error)
    else:
        name, sentence = "EngineError", traceback.format_exception_only(error)[-1].strip()
        # Before the worker hears of it: it kills us then. A full disk under standard error must not keep it from that.
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    with contextlib.suppress(OSError):  # the worker may be gone
        connection.send((MessageKind.FATAL, name, sentence))


def _fail(connection: WorkerConnection, error: BaseException) -> NoReturn:
    """The main thread may be in a step that will never end."""
    _tell_why(connection, error)
    os._exit(1)


def _load(
    model: ModelSettings, settings: EngineSettings, progress: Progress, fail: Fail
) -> tuple[ServedEngine, EngineInfo]:
    progress("libraries", 0.0)  # torch takes seconds to import: after the hello
    keep_compiled_kernels(os.environ)
    from engine.loading import load_engine, prepare_for_cpu

    prepare_for_cpu()
    libraries_seconds = seconds_since_start()
    engine, info = load_engine(model, settings, progress, fail)
    return engine, replace(info, start_seconds={"libraries": libraries_seconds, **info.start_seconds})


def seconds_since_start() -> float:
    """How long this process has lived, to the hundredth; 0 where the system is not Linux and does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd of all, seconds since the system's start
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError):
        return 0.0


def keep_compiled_kernels(environment: MutableMapping[str, str]) -> None:
    """flash-attn keeps what it compiles, 3 to 5 seconds a kernel, only where it is told to before it is imported.

    Not in its own default folder, which is below /tmp, where others could leave code for us. A setting of the user's
    stands.
    """
    if "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" in environment:
        return
    folder = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagemill" / "flash-attention"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # no home to write to: compiled anew by every process
    environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or not arguments[0].isdigit():
        print("usage: python -m engine.process FD  (the worker starts this; it is no command)", file=sys.stderr)
        return 2
    return run(int(arguments[0]), _load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
