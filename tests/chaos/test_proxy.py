"""The proxy between a plain client and a plain server."""

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import FaultProxy
from tests.servers.server_process import free_ports


class Shouter:
    """A server that answers each chunk with the same in capitals, and remembers what came."""

    def __init__(self) -> None:
        self.received = b""
        self.closed = threading.Semaphore(0)  # one more for each connection that ended
        self.came = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_for(self, wanted: bytes) -> None:
        with self.came:
            assert self.came.wait_for(lambda: self.received == wanted, 10), self.received

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._shout, args=(connection,), daemon=True).start()

    def _shout(self, connection: socket.socket) -> None:
        with connection:
            try:
                while chunk := connection.recv(1 << 16):
                    with self.came:
                        self.received += chunk
                        self.came.notify_all()
                    connection.sendall(chunk.upper())
            except OSError:
                pass
        self.closed.release()


@pytest.fixture
def server() -> Iterator[Shouter]:
    server = Shouter()
    yield server
    server.close()


@pytest.fixture
def proxy(server: Shouter) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def read(client: socket.socket, num_bytes: int) -> bytes:
    got = b""
    while len(got) < num_bytes and (chunk := client.recv(num_bytes - len(got))):
        got += chunk
    return got


def read_to_the_end(client: socket.socket) -> bytes:
    """All that came before the connection ended, in whatever way."""
    got = b""
    try:
        while chunk := client.recv(1 << 16):
            got += chunk
    except ConnectionResetError:
        pass
    return got


def test_bytes_pass_both_ways_in_chunks_of_any_size(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        for text in (b"a", b"bc" * 100_000):
            sender = threading.Thread(target=client.sendall, args=(text,))
            sender.start()
            assert read(client, len(text)) == text.upper()
            sender.join()
    assert proxy.num_connections == 1


def test_an_end_that_closes_ends_the_other(proxy: FaultProxy, server: Shouter) -> None:
    connect(proxy).close()
    assert server.closed.acquire(timeout=10)


def test_refused_connections_are_refused_open_ones_end_and_later_ones_pass(proxy: FaultProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"a")
        assert read(client, 1) == b"A"
        proxy.refuse()
        assert read_to_the_end(client) == b""
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
    proxy.pass_on()
    with connect(proxy) as client:
        client.sendall(b"b")
        assert read(client, 1) == b"B"


def test_a_cut_ends_open_connections_and_none_after(proxy: FaultProxy, server: Shouter) -> None:
    with connect(proxy) as client, connect(proxy) as other:
        for one in (client, other):
            one.sendall(b"a")
            assert read(one, 1) == b"A"
        proxy.cut()
        assert read_to_the_end(client) == read_to_the_end(other) == b""
        assert server.closed.acquire(timeout=10)
        assert server.closed.acquire(timeout=10)
    with connect(proxy) as client:
        client.sendall(b"b")
        assert read(client, 1) == b"B"


def test_a_request_is_cut_after_so_many_bytes_once(proxy: FaultProxy, server: Shouter) -> None:
    proxy.cut_requests_after(5)
    with connect(proxy) as client:
        client.sendall(b"abc")
        assert read(client, 3) == b"ABC"
        client.sendall(b"defg")
        read_to_the_end(client)
    server.wait_for(b"abcde")
    with connect(proxy) as client:
        client.sendall(b"hijklmn")
        assert read(client, 7) == b"HIJKLMN"


def test_an_answer_is_cut_after_so_many_bytes_once(proxy: FaultProxy, server: Shouter) -> None:
    proxy.cut_answers_after(2)
    with connect(proxy) as client:
        client.sendall(b"abc")
        assert read_to_the_end(client) == b"AB"
    server.wait_for(b"abc")
    with connect(proxy) as client:
        client.sendall(b"def")
        assert read(client, 3) == b"DEF"


def test_swallowed_answers_never_come_though_the_request_was_carried_out(proxy: FaultProxy, server: Shouter) -> None:
    proxy.swallow_answers()
    with connect(proxy) as client:
        client.sendall(b"abc")
        server.wait_for(b"abc")
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(10)
        proxy.pass_on()
        assert read_to_the_end(client) == b"", "a connection that lost an answer's bytes is not read on"
    with connect(proxy) as client:
        client.sendall(b"d")
        assert read(client, 1) == b"D"


def test_slow_connections_carry_everything_later(proxy: FaultProxy) -> None:
    proxy.slow(delay_seconds=0.01, bytes_per_second=100_000)
    with connect(proxy) as client:
        client.sendall(b"abc" * 1000)
        assert read(client, 3000) == b"ABC" * 1000


def test_without_a_server_behind_it_a_connection_ends_at_once() -> None:
    (nobody,) = free_ports(1)
    with FaultProxy(nobody) as proxy:
        for _ in range(3):
            try:
                with connect(proxy) as client:
                    assert read_to_the_end(client) == b""
            except ConnectionResetError:  # it came before `connect` had returned
                pass
        assert proxy.num_connections == 0


def test_a_closed_proxy_refuses(server: Shouter) -> None:
    with FaultProxy(server.port) as proxy:
        client = connect(proxy)
    with client:
        assert read_to_the_end(client) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
