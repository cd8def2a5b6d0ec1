"""What the worker says of what is yet to come reaches the engine, and what has begun reaches the worker."""

from contextlib import suppress
from dataclasses import replace

from engine import process, protocol
from engine.protocol import Message, MessageKind
from schemas.inference import EngineStats, InferenceOutput, InferenceRequest


class Done(Exception):
    """Ends the process's loop."""


class Connection:
    """Messages by turn; what is sent is kept."""

    def __init__(self, turns: list[list[Message]]) -> None:
        self.sent: list[Message] = []
        self._turns = turns

    def receive(self, wait: bool) -> list[Message]:
        if not self._turns:
            raise Done
        return self._turns.pop(0)

    def send(self, *messages: Message) -> None:
        self.sent += messages

    def step_started(self) -> None: ...
    def step_ended(self) -> None: ...


class Engine:
    """Begins a prompt token in each of the steps named."""

    def __init__(self, begins_at: set[int]) -> None:
        self.expected: list[object] = []
        self._stats = EngineStats()
        self._begins_at = begins_at

    def expect(self, beyond: object) -> None:
        self.expected.append(beyond)

    def add_request(self, request: InferenceRequest) -> None: ...
    def abort(self, request_ids: object) -> None: ...

    def step(self) -> list[InferenceOutput]:
        begins = self._stats.num_steps in self._begins_at
        self._stats = replace(
            self._stats,
            num_steps=self._stats.num_steps + 1,
            num_begun_tokens=self._stats.num_begun_tokens + begins,
        )
        return []

    def has_unfinished(self) -> bool:
        return True

    def stats(self) -> EngineStats:
        return self._stats


def serve(engine: Engine, turns: list[list[Message]]) -> list[EngineStats]:
    connection = Connection(turns)
    with suppress(Done):
        process.serve(connection, engine)  # type: ignore[arg-type]
    return [protocol.decode_stats(message) for message in connection.sent if message[0] == MessageKind.STATS]


def test_what_is_yet_to_come_reaches_the_engine_as_it_was_sent() -> None:
    engine = Engine(set())
    messages = [
        protocol.decode_message(protocol.encode_frame((MessageKind.EXPECT, beyond))[4:])
        for beyond in ({64: 1000, 8: 20}, {}, None)
    ]
    serve(engine, [messages])
    assert engine.expected == [{64: 1000, 8: 20}, {}, None]


def test_every_step_that_begins_requests_is_told_of_at_once() -> None:
    told = [stats.num_begun_tokens for stats in serve(Engine({1, 2, 5}), [[] for _ in range(7)])]
    assert sorted(set(told)) == [0, 1, 2, 3]
