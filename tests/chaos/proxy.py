"""A TCP proxy on loopback whose connections break on cue. It passes bytes and knows no protocol."""

import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.servers.server_process import free_ports

_CHUNK_BYTES = 16 * 1024
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: close sends RST, as a machine that lost us


@dataclass(frozen=True, slots=True)
class _Faults:
    refusing: bool = False
    swallowing_answers: bool = False
    delay_seconds: float = 0.0  # before each chunk, in both directions
    bytes_per_second: float = float("inf")  # of one connection in one direction


class _Connection:
    """Two sockets and the two threads that pump between them; the thread that ends last closes the sockets.

    Nobody else closes them: a number that is free again may be another connection's while a thread still reads by it.
    """

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.has_lost_bytes = False
        self.num_pumps = 2  # guarded by the proxy's lock

    def end(self, reset: bool) -> None:
        """Wakes both threads. What was sent still arrives, then the end, and after it a reset where asked for."""
        for end in (self.client, self.server):
            with suppress(OSError):  # ended before
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.client.close()
        self.server.close()


class FaultProxy:
    """`with FaultProxy(server_port) as proxy:` -> 127.0.0.1:`proxy.port` leads to 127.0.0.1:`server_port`.

    The faults are switched from any thread and act on open connections too. Each call of `refuse`, `swallow_answers`
    and `slow` takes the place of the one before; `pass_on` ends them all. Linux: elsewhere `refuse` cannot free a port
    and keep it.
    """

    def __init__(self, server_port: int = 0) -> None:
        self.server_port = server_port  # may be set later, before the first connection
        (self.port,) = free_ports(1)
        self.num_connections = 0  # accepted so far
        self._faults = _Faults()
        self._cut_requests_after: int | None = None  # bytes that still pass; guarded by the lock
        self._cut_answers_after: int | None = None
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._accepting: threading.Thread | None = None
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        with self._lock:
            return len(self._connections)

    def pass_on(self) -> None:
        """No fault any more. A connection that lost bytes of an answer is reset: nobody could read on from there."""
        with self._lock:
            self._cut_requests_after = self._cut_answers_after = None
            torn = [one for one in self._connections if one.has_lost_bytes]
        self._switch(_Faults())
        for connection in torn:
            connection.end(reset=True)

    def cut(self) -> None:
        """Resets every open connection now; new ones are as before."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end(reset=True)

    def refuse(self) -> None:
        """As with no process behind the port: open connections are reset, new ones refused."""
        self._switch(_Faults(refusing=True))
        self.cut()

    def swallow_answers(self) -> None:
        """Requests reach the server and are carried out, and no answer comes back: the client's time-out decides."""
        self._switch(_Faults(swallowing_answers=True))

    def slow(self, delay_seconds: float = 0.0, bytes_per_second: float = float("inf")) -> None:
        """Each chunk waits `delay_seconds`, and no connection carries more than `bytes_per_second` either way."""
        self._switch(_Faults(delay_seconds=delay_seconds, bytes_per_second=bytes_per_second))

    def cut_requests_after(self, num_bytes: int) -> None:
        """Once so many bytes more have gone to the server, the connection that brought the last one is reset."""
        with self._lock:
            self._cut_requests_after = num_bytes

    def cut_answers_after(self, num_bytes: int) -> None:
        """Once so many bytes more have come from the server, the connection that brought the last one is reset."""
        with self._lock:
            self._cut_answers_after = num_bytes

    def close(self) -> None:
        self.refuse()
        self._listener.close()

    def _switch(self, faults: _Faults) -> None:
        was_refusing, self._faults = self._faults.refusing, faults
        if faults.refusing and not was_refusing:
            self._listener.shutdown(socket.SHUT_RDWR)  # Linux: it keeps its port and listens no longer
            if self._accepting is not None:
                self._accepting.join()
        elif was_refusing and not faults.refusing:
            self._listen()

    def _listen(self) -> None:
        self._listener.listen()
        self._accepting = threading.Thread(target=self._accept, name=f"proxy {self.port}", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # listens no longer
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.server_port), timeout=5)
            except OSError:  # nobody there: the client sees a reset in place of the refusal
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, server)
            with self._lock:
                self.num_connections += 1
                self._connections.add(connection)
            for are_answers in (False, True):
                threading.Thread(target=self._pump, args=(connection, are_answers), daemon=True).start()

    def _pump(self, connection: _Connection, are_answers: bool) -> None:
        """Passes one direction's bytes on until an end closes; then the other direction ends too."""
        ends = connection.client, connection.server
        source, target = reversed(ends) if are_answers else ends
        reset = True
        try:
            while chunk := source.recv(_CHUNK_BYTES):
                faults = self._faults
                if wait := faults.delay_seconds + len(chunk) / faults.bytes_per_second:
                    time.sleep(wait)
                if are_answers and self._faults.swallowing_answers:
                    connection.has_lost_bytes = True
                    continue
                num_passing = self._num_before_the_cut(len(chunk), are_answers)
                target.sendall(chunk[:num_passing])
                if num_passing is not None:
                    break
            else:
                reset = False
        except OSError:  # reset, by an end or by us
            pass
        connection.end(reset)
        with self._lock:
            connection.num_pumps -= 1
            if not connection.num_pumps:
                self._connections.discard(connection)
                connection.close()

    def _num_before_the_cut(self, num_bytes: int, are_answers: bool) -> int | None:
        """How many of these bytes still pass before the connection is cut; None: all, and it is not cut."""
        with self._lock:
            left = self._cut_answers_after if are_answers else self._cut_requests_after
            if left is None:
                return None
            rest = left - num_bytes if num_bytes < left else None  # None: this is the cut, and it cuts once
            if are_answers:
                self._cut_answers_after = rest
            else:
                self._cut_requests_after = rest
            return left if rest is None else None
