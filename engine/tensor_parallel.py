"""Rank 0 and the other ranks: how they are started, told each step, and noticed when one is lost. No torch.

The engine process is rank 0. It schedules, samples and talks; the others carry out the steps that it tells them, each
on its part of the model. A step goes over a socket of its own to each rank, before rank 0 begins it, so that no rank
waits for another anywhere but inside the device's exchanges. The socket's end is the other side's end: a rank that
loses rank 0 exits at once, and rank 0 tells whoever owns it which rank it lost, and why.

A frame is 8 bytes of length, 8 of the header's length, the header in JSON, and the header's arrays, each at a multiple
of 8 bytes. Both ends run on one machine, so the bytes are in its own order.
"""

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from schemas.errors import EngineError, ModelError, PagemillError, SettingsError

Tree = dict[str, Any]  # of dicts, lists, strings, numbers, None, and arrays

RANK_COMMAND = (sys.executable, "-m", "engine.rank_process")
SEND_SECONDS = 300.0  # for a rank to take a step in
EXPLAIN_SECONDS = 5.0  # for a lost rank's exit to be seen, once an exchange with it has failed
_LENGTH_BYTES = 8
_ARRAY = "array of"  # the key of an array's place in the header


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step as the other ranks hear of it."""

    scrub: Sequence[int]  # blocks to zero first
    inputs: Any  # what the runner gathered, a dataclass of arrays; a tree of them where it is received; None: no tokens
    whole_logits: bool  # the sampler asks for all of the vocabulary's


class Ranks:
    """Rank 0's end. Of none by default: then nothing is told, and nothing can be lost."""

    def __init__(self, on_lost: Callable[[PagemillError], object] = lambda error: None) -> None:
        """`on_lost` is called, from a thread of its own, once, when a rank is."""
        self._on_lost = on_lost
        self._others: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._lost: PagemillError | None = None
        self._lost_one = threading.Event()
        self._is_closing = False

    def start(self, hello: Tree, num_others: int, command: Sequence[str] = RANK_COMMAND) -> None:
        """Starts ranks 1 to `num_others` and greets each with `hello` and its "rank". They die with this thread.

        `command` starts one; the socket's descriptor is added to it as the last argument.
        """
        for rank in range(1, num_others + 1):
            ours, theirs = socket.socketpair()
            ours.settimeout(SEND_SECONDS)
            with theirs:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),)
                )
            self._others.append((process, ours))
            ours.sendall(pack({**hello, "rank": rank}))
        threading.Thread(target=self._watch, name="engine-ranks", daemon=True).start()

    def tell(self, message: Any) -> None:
        """A RankStep, or a tree, to every other rank. Raises EngineError where one does not take it."""
        if not self._others:
            return
        frame = pack(message)
        for rank, (_, sock) in enumerate(self._others, 1):
            try:
                sock.sendall(frame)
            except TimeoutError:
                raise EngineError(f"rank {rank} of the engine has not taken a step for {SEND_SECONDS:g} s") from None
            except OSError as error:
                self._lost_one.wait(EXPLAIN_SECONDS)
                raise self._lost or EngineError(f"rank {rank} of the engine cannot be reached: {error}") from error

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """An exchange in here may fail because some rank is lost: then raises what that rank was lost to instead."""
        try:
            yield
        except RuntimeError as error:
            if self._others and self._lost_one.wait(EXPLAIN_SECONDS) and self._lost is not None:
                raise self._lost from error
            raise

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""
        self._is_closing = True
        for process, sock in self._others:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes our thread, and the rank, which exits
            try:
                process.wait(EXPLAIN_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            sock.close()
        self._others = []

    def _watch(self) -> None:
        """Other ranks speak once, when they fail; or their sockets just close."""
        poller = select.poll()
        ranks = {sock.fileno(): (rank, *other) for rank, other in enumerate(self._others, 1) for sock in (other[1],)}
        for descriptor in ranks:
            poller.register(descriptor, select.POLLIN)
        rank, process, sock = ranks[poller.poll()[0][0]]
        if self._is_closing:
            return
        with suppress(OSError):
            if (frame := _read_frame(sock)) is not None:
                self._lost = _failed(rank, unpack(frame))
        if self._lost is None:
            self._lost = _died(rank, process)
        self._lost_one.set()
        self._on_lost(self._lost)


class RankConnection:
    """Another rank's end of its socket, read on a thread, so that its closing ends this process at any time."""

    def __init__(self, descriptor: int) -> None:
        self._sock = socket.socket(fileno=descriptor)
        self._inbox: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="rank-socket", daemon=True).start()

    def receive(self) -> Tree:
        """What rank 0 tells next; waits for it."""
        return unpack(self._inbox.get())

    def receive_step(self) -> RankStep:
        return RankStep(**self.receive())

    def fail(self, error: BaseException) -> None:
        """This rank's last words."""
        kind = type(error).__name__ if isinstance(error, PagemillError) else EngineError.__name__
        sentence = str(error) if isinstance(error, PagemillError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):
            self._sock.sendall(pack({"kind": kind, "sentence": sentence}))

    def _receive(self) -> None:
        with suppress(OSError):
            while (frame := _read_frame(self._sock)) is not None:
                self._inbox.put(frame)
        os._exit(0)  # rank 0 is gone


def pack(tree: Any) -> bytes:
    """A frame. Dataclasses become trees; tensors on the CPU, arrays."""
    arrays: list[np.ndarray[Any, Any]] = []

    def described(leaf: Any) -> Tree:
        if is_dataclass(leaf):
            return {field.name: getattr(leaf, field.name) for field in fields(leaf)}
        array = np.ascontiguousarray(leaf)
        arrays.append(array)
        return {_ARRAY: [array.dtype.str, np.shape(leaf)]}

    header = json.dumps(tree, default=described).encode()
    parts = [_padded(header), *(_padded(array.tobytes()) for array in arrays)]
    lengths = (_LENGTH_BYTES + sum(map(len, parts)), len(header))
    return b"".join([*(n.to_bytes(_LENGTH_BYTES, sys.byteorder) for n in lengths), *parts])


def unpack(frame: bytearray) -> Tree:
    """The tree of a frame without its length. Arrays lie in the frame."""
    end = _LENGTH_BYTES + int.from_bytes(frame[:_LENGTH_BYTES], sys.byteorder)
    offset = _aligned(end)

    def placed(tree: Tree) -> Any:
        nonlocal offset
        if _ARRAY not in tree:
            return tree
        dtype, shape = np.dtype(tree[_ARRAY][0]), tree[_ARRAY][1]
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(frame, dtype, count, offset) if count else np.empty(0, dtype)
        offset = _aligned(offset + array.nbytes)
        return array.reshape(shape)

    # The decoder finishes objects in the order in which the encoder met their arrays.
    tree: Tree = json.loads(frame[_LENGTH_BYTES:end], object_hook=placed)
    return tree


def _read_frame(sock: socket.socket) -> bytearray | None:
    """None at the end of the stream."""
    if (length := _read_exactly(sock, _LENGTH_BYTES)) is None:
        return None
    return _read_exactly(sock, int.from_bytes(length, sys.byteorder))


def _read_exactly(sock: socket.socket, count: int) -> bytearray | None:
    content = bytearray(count)
    view, filled = memoryview(content), 0
    while filled < count:
        if not (received := sock.recv_into(view[filled:])):
            return None
        filled += received
    return content


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


def _padded(content: bytes) -> bytes:
    return content + bytes(_aligned(len(content)) - len(content))


def _failed(rank: int, words: Tree) -> PagemillError:
    kinds = {kind.__name__: kind for kind in (ModelError, SettingsError)}
    return kinds.get(words["kind"], EngineError)(f"rank {rank} of the engine failed: {words['sentence']}")


def _died(rank: int, process: subprocess.Popen[bytes]) -> EngineError:
    try:
        status = process.wait(EXPLAIN_SECONDS)
    except subprocess.TimeoutExpired:
        return EngineError(f"rank {rank} of the engine closed its socket and did not exit")
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return EngineError(f"rank {rank} of the engine {how}; its last words are on standard error")
