"""The worker's end of the engine process: starts it, feeds it, hears from it, ends it. No torch, no model."""

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from engine import protocol
from engine.protocol import Message, MessageKind
from schemas.errors import EngineError, ModelError, PagemillError, SettingsError
from schemas.inference import (
    EngineInfo,
    EngineSettings,
    EngineStats,
    InferenceOutput,
    InferenceRequest,
    ModelSettings,
)

DEFAULT_COMMAND = (sys.executable, "-m", "engine.process")
CLOSE_SECONDS = 5.0
GIVE_UP_SECONDS = 0.2  # between two questions whether a start is still wanted
LOOK_SECONDS = 1.0  # the longest wait at a time, and the most that counts as silence of the time between two looks
START_SILENCE_SECONDS = 120.0  # at the least, while it starts: imports and loading may hold up every thread
STEP_SECONDS = {"cpu": 1800.0}  # by device, where the settings name none; 8,192 tokens are long on a small CPU
STEP_SECONDS_ELSEWHERE = 300.0  # a step takes less than one, but kernels of a new shape are compiled in it


class EngineClient:
    """One engine process and the socket to it.

    `command` starts the process; the socket's descriptor is added to it as the last argument. `submit` and `abort`
    may be called from one thread while another polls. Once the process is lost, every call raises the same EngineError;
    what it had not answered is the caller's to submit again, to a new client.

    silence_seconds  without a sign of life, which the process gives every second: it is frozen
    step_seconds     for one step: it hangs; 0: by the device
    """

    def __init__(
        self,
        model: ModelSettings,
        engine: EngineSettings,
        command: Sequence[str] | None = None,
        silence_seconds: float = 30.0,
        step_seconds: float = 0.0,
    ) -> None:
        self.stats = EngineStats()  # the latest that the engine has pushed
        self._model = model
        self._engine = engine
        self._command = tuple(command) if command is not None else DEFAULT_COMMAND
        self._silence_seconds = silence_seconds
        self._step_seconds = step_seconds
        self._is_serving = False
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper: threading.Thread | None = None
        self._reader = protocol.FrameReader()
        self._unread: list[Message] = []  # read by a failed send, on its way to the cause; poll has them first
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()
        self._silent_seconds = 0.0  # since something came, not counting when nobody looked
        self._last_look = 0.0
        self._lost: PagemillError | None = None
        self._is_closing = False

    @property
    def process_id(self) -> int | None:
        """The engine process's id, None before start."""
        return self._process.pid if self._process is not None else None

    def start(
        self,
        timeout_seconds: float,
        on_progress: Callable[[str, float], None] | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> EngineInfo:
        """Start the process and wait until its model is loaded, or until `give_up`, asked now and then, says so.

        Raises ModelError where the model cannot be served, SettingsError where it cannot be as the settings ask,
        EngineError where the process cannot start, dies, is not ready in time, or given up; none is left then.
        """
        assert self._process is None, "a client starts one process; make another client for another process"
        deadline = time.monotonic() + timeout_seconds
        part = "process"
        try:
            self._spawn()
            self._send(protocol.hello_with_settings(self._model, self._engine))
            greeted = False
            while True:
                messages = self._receive(min(GIVE_UP_SECONDS, deadline - time.monotonic()))
                if give_up is not None and give_up():
                    raise EngineError(f"the engine's start was given up (it was at: {part})")
                if not messages and time.monotonic() >= deadline:
                    raise EngineError(
                        f"the engine was not ready after {timeout_seconds:g} s (it was at: {part}); "
                        "a larger worker.engine_start_timeout_seconds gives it more time"
                    )
                for message in messages:
                    if not greeted:
                        protocol.check_version(message)
                        greeted = True
                    elif message[0] == MessageKind.PROGRESS:
                        part = message[1]
                        if on_progress is not None:
                            on_progress(part, message[2])
                    elif message[0] == MessageKind.READY:
                        return self._serves(protocol.decode_info(message))
                    elif message[0] != MessageKind.HEARTBEAT:
                        raise EngineError(f"the engine sent a message of kind {message[0]} while it started")
        except BaseException as error:
            if self._lost is None and isinstance(error, EngineError):
                self._lost = error
            self.kill()
            raise

    def _serves(self, info: EngineInfo) -> EngineInfo:
        self._is_serving = True
        self._silent_seconds = 0.0
        self._step_seconds = self._step_seconds or STEP_SECONDS.get(info.device, STEP_SECONDS_ELSEWHERE)
        return info

    def submit(self, requests: Sequence[InferenceRequest]) -> None:
        """Hand requests over; each ends in one InferenceOutput out of `poll`. Raises EngineError where it is lost."""
        for start in range(0, len(requests), protocol.REQUESTS_PER_FRAME):
            self._send(protocol.encode_requests(requests[start : start + protocol.REQUESTS_PER_FRAME]))

    def abort(self, request_ids: Iterable[int]) -> None:
        """Ask for requests to end now. Each still ends in one output: "abort", or whatever it ended with before."""
        self._send((MessageKind.ABORT, tuple(request_ids)))

    def expect(self, beyond: Mapping[int, int] | None) -> None:
        """Say what will be submitted besides what was: longest output -> prompt tokens; None: nobody knows."""
        self._send((MessageKind.EXPECT, None if beyond is None else dict(beyond)))

    def poll(self, timeout_seconds: float) -> list[InferenceOutput]:
        """Outputs as soon as there are some, an empty list after the time-out.

        Raises EngineError when the process died, hangs or sent what is not ours; outputs that came before are returned
        first.
        """
        deadline = time.monotonic() + timeout_seconds
        outputs: list[InferenceOutput] = []
        while not outputs:
            for message in self._receive(deadline - time.monotonic()):
                try:
                    self._take(message, outputs)
                except EngineError as error:
                    self._lose(error)
                except (TypeError, ValueError, IndexError, KeyError) as error:
                    self._lose(
                        EngineError(f"the engine sent a message of kind {message[0]} that cannot be read: {error}")
                    )
            if self._lost is not None or time.monotonic() >= deadline:
                break
        if not outputs and self._lost is not None:
            raise self._lost
        return outputs

    def kill(self) -> None:
        """End the process now. Idempotent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the process: it exits when the socket closes. What it had not answered is lost. Idempotent."""
        self._is_closing = True
        sock, process, reaper = self._sock, self._process, self._reaper
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that polls, and the engine
        if process is not None and reaper is not None:
            reaper.join(CLOSE_SECONDS)
            if reaper.is_alive():
                process.send_signal(signal.SIGKILL)
                reaper.join()
        if sock is not None:
            with self._send_lock, self._receive_lock:
                sock.close()
        if self._lost is None:
            self._lost = EngineError("the engine was closed")

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        spawned: Future[subprocess.Popen[bytes]] = Future()

        def start_and_reap() -> None:
            # The kernel kills the child with the *thread* that started it (PR_SET_PDEATHSIG), so that thread must live
            # as long as the child: it waits for it.
            try:
                process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a library prints must not mix with a command's output
                    pass_fds=(theirs.fileno(),),
                    process_group=0,  # an interrupt from the terminal is the worker's to act on
                )
            except BaseException as error:
                spawned.set_exception(error)
                return
            spawned.set_result(process)
            process.wait()

        self._reaper = threading.Thread(target=start_and_reap, name="engine-reaper", daemon=True)
        self._reaper.start()
        try:
            self._process = spawned.result()
        except OSError as error:
            raise EngineError(f"the engine process cannot be started with {self._command[0]!r}: {error}") from error
        finally:
            theirs.close()  # or the socket would not close with the process
        self._last_look = time.monotonic()

    def _send(self, message: Message) -> None:
        frame = memoryview(protocol.encode_frame(message))
        with self._send_lock:
            if self._lost is not None:
                raise self._lost
            sock = self._open_socket()
            while frame:
                try:
                    sent = sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    if not _wait(sock, select.POLLOUT, self._silence_seconds):
                        raise self._lose(self._frozen()) from None
                    continue
                except OSError:
                    raise self._read_to_the_end() from None
                frame = frame[sent:]

    def _read_to_the_end(self) -> PagemillError:
        """Why the socket closed: the process may have said so before it went."""
        with self._receive_lock:
            while self._lost is None:
                self._unread += self._read(self._silence_seconds)
        return self._lost

    def _receive(self, timeout_seconds: float) -> list[Message]:
        """Messages, as soon as there are some; none after the time-out or LOOK_SECONDS, or when the process is lost."""
        with self._receive_lock:
            if self._unread:
                unread, self._unread = self._unread, []
                return unread
            if self._lost is not None:
                raise self._lost
            return self._read(timeout_seconds)

    def _read(self, timeout_seconds: float) -> list[Message]:
        sock = self._open_socket()
        seconds = max(0.0, min(timeout_seconds, LOOK_SECONDS))
        has_come = _wait(sock, select.POLLIN, seconds)
        now = time.monotonic()
        # We may have been the frozen one, or both of us: the engine then needs time to beat.
        self._silent_seconds += min(now - self._last_look, seconds + LOOK_SECONDS)
        self._last_look = now
        if not has_come:
            if self._silent_seconds >= self._silence_limit():
                self._lose(self._frozen())
            return []
        self._silent_seconds = 0.0
        try:
            received = sock.recv(protocol.RECEIVE_BYTES)
        except OSError:
            received = b""
        if not received:
            self._lose(EngineError("the engine was closed") if self._is_closing else self._died())
            return []
        messages = []
        try:
            for payload in self._reader.feed(received):
                message = protocol.decode_message(payload)
                if message[0] == MessageKind.FATAL:
                    self._lose(_failed(message[1], message[2]))
                    break
                messages.append(message)
        except EngineError as error:
            self._lose(EngineError(f"the engine sent what is not ours: {error}"))
        return messages

    def _take(self, message: Message, outputs: list[InferenceOutput]) -> None:
        if message[0] == MessageKind.OUTPUTS:
            outputs += protocol.decode_outputs(message)
        elif message[0] == MessageKind.STATS:
            self.stats = protocol.decode_stats(message)
        elif message[0] == MessageKind.HEARTBEAT:
            if message[1] > self._step_seconds:
                raise EngineError(f"the engine hangs: its present step has run for {message[1]:.0f} s; it was killed")
        else:
            raise EngineError(f"the engine sent a message of kind {message[0]} while it served")

    def _open_socket(self) -> socket.socket:
        assert self._sock is not None, "start() comes first"
        return self._sock

    def _lose(self, error: PagemillError) -> PagemillError:
        """The process is of no use any more: note why (the first cause stays), end it, so that it frees its memory."""
        if self._lost is None:
            self._lost = error
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
        return self._lost

    def _silence_limit(self) -> float:
        return self._silence_seconds if self._is_serving else max(self._silence_seconds, START_SILENCE_SECONDS)

    def _frozen(self) -> EngineError:
        return EngineError(f"the engine gave no sign of life for {self._silence_limit():g} s; it was killed")

    def _died(self) -> EngineError:
        assert self._process is not None
        assert self._reaper is not None
        self._reaper.join(CLOSE_SECONDS)
        status = self._process.returncode
        if status is None:
            return EngineError("the engine closed its socket and did not exit; it was killed")
        if status < 0:
            name = signal.Signals(-status).name
            hint = "; SIGKILL without us mostly means that memory ran out" if -status == signal.SIGKILL else ""
            return EngineError(f"the engine process died of {name}{hint}")
        return EngineError(f"the engine process exited with status {status}; its last words are on standard error")


def _failed(name: str, sentence: str) -> PagemillError:
    """What the process said it failed with; the names of what start-up may raise are kept."""
    for kind in (ModelError, SettingsError):
        if name == kind.__name__:
            return kind(sentence)
    return EngineError(f"the engine failed: {sentence}")


def _wait(sock: socket.socket, event: int, timeout_seconds: float) -> bool:
    poller = select.poll()  # select.select refuses descriptors from 1,024 on
    poller.register(sock, event)
    return bool(poller.poll(timeout_seconds * 1000))
