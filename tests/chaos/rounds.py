"""A round of chaos as a pure function of its seed: the documents, their ends, and which faults come when.

Nothing here runs anything. A change of what is drawn changes every round: the seeds in KEPT then mean others.
"""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any

from schemas.errors import FailureCode
from tests.e2e.documents import BAD, Sent, document

MAX_DOCUMENT_BYTES = 400_000
MAX_BODY_BYTES = 256 * 1024  # of one request that the node takes: a row past it can never be stored
SESSION_SECONDS = 4.0
REAL_ENGINE_EVERY = 10
KILLER_EVERY = 8  # finding one out costs several engines
LATE_FROM = 5000  # numbers of documents of a partition that is added
AGAIN = " again"  # ends the name of a document's second delivery
# In a prompt: what the engine without a model does on it. The last one takes the worker down with it.
KILLER_TOKEN, NOT_FINITE_TOKEN, WORKER_KILLER_TOKEN = 60_001, 60_002, 60_003
WORKER_KILLER = "worker killer"


# Rounds that did not hold once, or cost more than they should have, and what they showed. Every run begins with them.
KEPT = {
    4245: "the offset of a deleted topic was believed where another partition had none: documents were passed over",
    730430: "SIGTERM with the disk under a worker's log full: it ended in order, but with exit code 1",
    730461: "a reset connection ended a worker, and a client that had missed its broker's death read nothing any more",
    730843: "a document killed workers faster than they could tell that they had begun it, and was never convicted",
    888174: "two workers made the index at once, and one took the other's alias for an index",
    888185: "what a killed worker had completed was forgotten by the next owner, which read none of it",
    960025: "a row that the node rejected behind a worker's grace was neither failed nor handed back",
    2100150: "a signal was swallowed by kafka-python while a worker started, which then went on",
    3100013: "behind a broker's death the dead letters' producer waited for ever for what it no longer asked for",
    4100066: "an engine that was closed while it sent an answer ended with a traceback, as if it had failed",
    5100358: "an offset that a topic made again did not have yet was told as a loss, and resetting asked for",
    148: "a full disk under a worker's log ended the worker, and what it had in flight was computed again",
}
_AS_BEFORE = frozenset({888174, 888185})  # found while rounds had nothing of `_with_more`


class FaultKind(StrEnum):
    """What happens. "A while" is the fault's `seconds`."""

    KILL_WORKER = "kill -9 of a worker; another one starts"
    STOP_WORKER = "SIGTERM to a worker; another one starts"
    LEAVE = "SIGTERM to a worker; the others take over"
    JOIN = "one more worker"
    FREEZE_WORKER = "a worker frozen for a while, within its session"
    OUST_WORKER = "a worker frozen until its session is over"
    KILL_ENGINE = "kill -9 of an engine"
    FREEZE_ENGINE = "an engine frozen for a while"
    KILL_BROKER = "kill -9 of the broker, gone for a while"
    FREEZE_BROKER = "the broker frozen for a while"
    KILL_NODE = "kill -9 of the node, gone for a while"
    FREEZE_NODE = "the node frozen for a while"
    CUT_KAFKA = "all connections to the broker reset"
    REFUSE_KAFKA = "the broker refuses connections for a while"
    SLOW_KAFKA = "the way to the broker slow for a while"
    SWALLOW_KAFKA = "the broker's answers lost for a while"
    CUT_KAFKA_REQUEST = "a connection reset within a request to the broker"
    CUT_KAFKA_ANSWER = "a connection reset within an answer of the broker"
    CUT_NODE = "all connections to the node reset"
    REFUSE_NODE = "the node refuses connections for a while"
    SLOW_NODE = "the way to the node slow for a while"
    SWALLOW_NODE = "the node's answers lost for a while, past the request's time-out"
    CUT_NODE_REQUEST = "a connection reset within a request to the node"
    CUT_NODE_ANSWER = "a connection reset within an answer of the node"
    BLOCK_DISK = "the index blocked for a while, as by a full disk"
    BLOCK_WRITES = "the index blocked for a while, by an operator"
    PRESSURE = "other clients fill the node's small queues for a while"
    FAIL_ENGINE = "a step of an engine fails, as by a CUDA error"
    HANG_ENGINE = "an engine frozen until it is taken for hung"
    FULL_DISK = "a worker's disk full for a while: it cannot write its log"
    ADD_PARTITION = "a partition added to the topic, with documents in it"
    REMAKE_TOPIC = "the topic deleted and made again, with all of its documents"
    TRUNCATE = "retention deletes what the group has not read, and a worker is killed"
    TRUNCATE_AWAY = "retention deletes what the group has not read while no worker runs"


TOPIC_FAULTS = frozenset({FaultKind.ADD_PARTITION, FaultKind.REMAKE_TOPIC, FaultKind.TRUNCATE, FaultKind.TRUNCATE_AWAY})
# Two deaths from outside over one document that runs alone are not to be told from a killer's.
DEATHS = frozenset({FaultKind.KILL_WORKER, FaultKind.OUST_WORKER, FaultKind.TRUNCATE})
LOSSES = frozenset({FaultKind.TRUNCATE, FaultKind.TRUNCATE_AWAY})  # of documents, which the worker must name


@dataclass(frozen=True, slots=True)
class _Odds:
    weight: int
    seconds: tuple[float, float] = (0.0, 0.0)  # how long it lasts, from and to


# What costs a server's start comes seldom, so that rounds stay fast.
_ODDS = {
    FaultKind.KILL_WORKER: _Odds(10),
    FaultKind.STOP_WORKER: _Odds(6),
    FaultKind.LEAVE: _Odds(5),
    FaultKind.JOIN: _Odds(6),
    FaultKind.FREEZE_WORKER: _Odds(5, (0.3, SESSION_SECONDS / 2)),
    FaultKind.OUST_WORKER: _Odds(4, (SESSION_SECONDS + 1, SESSION_SECONDS + 3)),
    FaultKind.KILL_ENGINE: _Odds(10),
    FaultKind.FREEZE_ENGINE: _Odds(3, (0.3, 2.0)),
    FaultKind.KILL_BROKER: _Odds(2, (0.0, 2.0)),
    FaultKind.FREEZE_BROKER: _Odds(4, (0.3, 3.0)),
    FaultKind.KILL_NODE: _Odds(2, (0.0, 2.0)),
    FaultKind.FREEZE_NODE: _Odds(4, (0.3, 5.0)),
    FaultKind.CUT_KAFKA: _Odds(4),
    FaultKind.REFUSE_KAFKA: _Odds(4, (0.3, 3.0)),
    FaultKind.SLOW_KAFKA: _Odds(3, (0.3, 2.0)),
    FaultKind.SWALLOW_KAFKA: _Odds(4, (0.3, 3.0)),
    FaultKind.CUT_KAFKA_REQUEST: _Odds(4),
    FaultKind.CUT_KAFKA_ANSWER: _Odds(4),
    FaultKind.CUT_NODE: _Odds(4),
    FaultKind.REFUSE_NODE: _Odds(4, (0.3, 3.0)),
    FaultKind.SLOW_NODE: _Odds(3, (0.3, 2.0)),
    FaultKind.SWALLOW_NODE: _Odds(5, (0.3, 5.0)),
    FaultKind.CUT_NODE_REQUEST: _Odds(5),
    FaultKind.CUT_NODE_ANSWER: _Odds(5),
    FaultKind.BLOCK_DISK: _Odds(5, (0.3, 3.0)),
    FaultKind.BLOCK_WRITES: _Odds(4, (0.3, 3.0)),
    FaultKind.PRESSURE: _Odds(6, (0.3, 2.0)),
}
# Drawn apart, besides those above, by their own numbers: at most one of the topic's in a round.
_MORE_ODDS = {
    FaultKind.FAIL_ENGINE: _Odds(6),
    FaultKind.HANG_ENGINE: _Odds(4, (20.0, 20.0)),
    FaultKind.FULL_DISK: _Odds(6, (0.3, 5.0)),
    FaultKind.ADD_PARTITION: _Odds(5),
    FaultKind.REMAKE_TOPIC: _Odds(4),
    FaultKind.TRUNCATE: _Odds(4),
    FaultKind.TRUNCATE_AWAY: _Odds(3),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It comes by the round's progress, so that a replay meets the same state."""

    kind: FaultKind
    after_answers: int  # computed by any engine of the round
    seconds: float
    victim: int  # which worker: this number modulo those that run
    num_bytes: int  # where a connection is cut


@dataclass(frozen=True, slots=True)
class Round:
    """All that a round is made of."""

    seed: int
    has_real_engine: bool
    num_partitions: int
    num_shards: int
    num_workers: int  # at the start
    max_in_flight: int  # documents of one worker
    bulk_documents: int
    flush_seconds: float
    requests_per_step: int  # of the engine, and it steps 50 times a second at the most
    sent: tuple[Sent, ...]
    late: tuple[Sent, ...]  # sent to a partition that a fault adds
    faults: tuple[Fault, ...]
    security_protocol: str  # of the way to the broker
    sasl_mechanism: str | None
    has_tls_node: bool  # the node behind TLS that asks for a password

    @property
    def every(self) -> tuple[Sent, ...]:
        """All documents, in the order in which they are sent."""
        return self.sent + self.late

    @property
    def kills_workers(self) -> bool:
        """Whether a document does."""
        return any(one.name == WORKER_KILLER for one in self.sent)

    def has(self, kinds: Container[FaultKind]) -> bool:
        return any(fault.kind in kinds for fault in self.faults)

    @property
    def num_answers(self) -> int:
        """Documents that an engine answers at least once: the others end before it."""
        before_it = {*FailureCode} - {FailureCode.INVALID_OUTPUT, FailureCode.SINK_REJECTED}
        return sum(one.expected not in before_it for one in self.sent)


def make_round(seed: int) -> Round:
    """The round of this seed, the same at every call."""
    random = Random(seed)
    has_real_engine = seed % REAL_ENGINE_EVERY == 0
    num_partitions = random.randint(1, 6)
    sent = _make_documents(random, random.randint(60, 150) if has_real_engine else random.randint(500, 3000))
    if not has_real_engine:
        _insert(random, sent, _make_hostile(random, seed))
    sent = [replace(one, partition=random.randrange(num_partitions)) for one in sent]
    drawn = Round(
        seed=seed,
        has_real_engine=has_real_engine,
        num_partitions=num_partitions,
        num_shards=random.choice((1, 1, 2, 6)),
        num_workers=random.randint(1, 2) if has_real_engine else random.randint(1, 3),
        max_in_flight=random.choice((32, 48, 64, 128, 256)),
        bulk_documents=random.choice((20, 100, 1000)),
        flush_seconds=random.choice((0.05, 0.1, 0.2)),
        requests_per_step=random.choice((4, 8, 16)),
        sent=tuple(_with_later_ones(random, sent)),
        late=(),
        faults=(),
        security_protocol="PLAINTEXT",
        sasl_mechanism=None,
        has_tls_node=False,
    )
    made = _with_faults(drawn, random)
    return made if seed in _AS_BEFORE else _with_more(made, Random(f"{seed} and more"))


def _with_faults(drawn: Round, random: Random) -> Round:
    num_faults = random.randint(1, 2) if drawn.has_real_engine else random.randint(1, 5)
    faults = _draw_faults(random, _ODDS, num_faults, int(0.9 * drawn.num_answers))
    return replace(drawn, faults=tuple(sorted(faults, key=lambda fault: fault.after_answers)))


def _draw_faults(random: Random, odds: Mapping[FaultKind, _Odds], num_faults: int, num_answers: int) -> list[Fault]:
    kinds = random.choices(list(odds), [one.weight for one in odds.values()], k=num_faults)
    return [
        Fault(
            kind=kind,
            after_answers=random.randrange(num_answers),
            seconds=round(random.uniform(*odds[kind].seconds), 2),
            victim=random.randrange(12),
            num_bytes=int(10 ** random.uniform(1, 5)),
        )
        for kind in kinds
    ]


def _with_more(drawn: Round, random: Random) -> Round:
    """What rounds were given later, drawn by numbers of its own, so that the rest of a round stayed as it was."""
    faults = list(drawn.faults)
    for fault in _draw_faults(random, _MORE_ODDS, random.choice((0, 0, 0, 1, 1, 2)), int(0.9 * drawn.num_answers)):
        if fault.kind not in TOPIC_FAULTS or not any(other.kind in TOPIC_FAULTS for other in faults):
            faults.append(fault)
    protocol = random.choice(("PLAINTEXT", "PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"))
    mechanism = random.choice(("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"))
    made = replace(
        drawn,
        faults=tuple(sorted(faults, key=lambda fault: fault.after_answers)),
        security_protocol=protocol,
        sasl_mechanism=mechanism if protocol.startswith("SASL") else None,
        has_tls_node=random.random() < 0.25,
    )
    if random.random() < 0.04 and not made.has_real_engine and not made.has(TOPIC_FAULTS):
        made = _with_worker_killer(made, random)
    if made.has({FaultKind.ADD_PARTITION}):
        late = [_good(LATE_FROM + i, random) for i in range(random.randint(1, 60))]
        return replace(made, late=tuple([replace(one, partition=made.num_partitions) for one in late]))
    if made.has(LOSSES):  # of two deliveries of a document the later one may be lost, and then which row is right?
        made = replace(made, sent=tuple([one for one in made.sent if not one.name.endswith(AGAIN)]))
        latest = int(0.9 * made.num_answers)
        faults = [replace(fault, after_answers=min(fault.after_answers, latest)) for fault in made.faults]
        return replace(made, faults=tuple(faults))
    return made


def _with_worker_killer(made: Round, random: Random) -> Round:
    """A document that kills engine and worker at once, and no more than one other death of a worker."""
    value = document(id=WORKER_KILLER, prompt_token_ids=[1, WORKER_KILLER_TOKEN])
    partition = random.randrange(made.num_partitions)
    killer = Sent(WORKER_KILLER, partition, value, expected=FailureCode.ENGINE_LOST, document_id=WORKER_KILLER)
    sent = list(made.sent)
    _insert(random, sent, [killer])
    deaths = [fault for fault in made.faults if fault.kind in DEATHS]
    faults = [fault for fault in made.faults if fault not in deaths[1:]]
    return replace(made, sent=tuple(sent), faults=tuple(faults))


# Every prompt holds its document's number: an engine's record of what it has computed then tells documents apart.
_GOOD: tuple[Callable[[int], dict[str, Any]], ...] = (
    lambda i: {"prompt": f"document number {i}"},
    lambda i: {"prompt_token_ids": [1 + i % 200, 1 + i // 200, *[1 + (i * 7 + k) % 200 for k in range(i % 40)]]},
    lambda i: {"task": "echo", "fields": {"text": f"word {i}", "unused": [i, None]}},
    lambda i: {"task": "echo", "fields": {"text": f"a NUL \0 in {i}"}},
    lambda i: {"task": "sentiment", "fields": {"text": f"thing {i}"}},
    lambda i: {"task": "long", "fields": {"text": f"{i} and on " * 60}},
    lambda i: {"prompt": f"<|im_end|> </s> ü 漢 🙂 {i}", "metadata": {"deep": {"n": i}, "": [1, {"a.b": None}]}},
    lambda i: {"prompt": f"soon {i}", "priority": i % 21 - 10, "deadline": "2100-01-01T00:00:00+02:00"},
    lambda i: {"prompt": f"nothing asked {i}", "sampling": {"max_tokens": 0}},
    lambda i: {"prompt": f"drawn {i}", "sampling": {"temperature": 1.0, "top_k": 5, "logprobs": 2, "max_tokens": 3}},
    lambda i: {"prompt": f"until {i}", "sampling": {"stop": ["e"], "ignore_eos": True, "max_tokens": 6}},
    lambda i: {"prompt": f"with much beside it {i}", "metadata": {"much": "x" * (1000 + i * 997 % 20_000)}},
)


def _make_documents(random: Random, num_good: int) -> list[Sent]:
    """Good ones and, in random places between them, some that end otherwise. All in partition 0 as yet."""
    sent = [_good(i, random) for i in range(num_good)]
    bad = {name: one for name, one in BAD.items() if name != "too large"}  # that of another limit than ours
    for name in random.sample(sorted(bad), random.randint(0, len(bad))):
        value, code = bad[name]
        _insert(random, sent, [Sent(name, 0, value, key=name.encode(), expected=code)])
    for i in range(random.choice((0, 0, 1, 3))):
        huge = document(id=f"huge-{i}", prompt=f"huge {i}", metadata={"x": "x" * (MAX_DOCUMENT_BYTES + 1)})
        _insert(random, sent, [Sent(f"huge-{i}", 0, huge, expected=FailureCode.DOCUMENT_TOO_LARGE)])
    for i in range(random.choice((0, 0, 1, 3))):
        name = f"large-{i}"
        large = document(id=name, prompt=f"large row {i}", metadata={"x": "x" * (MAX_BODY_BYTES + 1)})
        _insert(random, sent, [Sent(name, 0, large, expected=FailureCode.SINK_REJECTED, document_id=name)])
    return sent


def _make_hostile(random: Random, seed: int) -> list[Sent]:
    """Documents that the engine without a model fails on: logits that are not finite, and one that kills it."""
    codes = [(NOT_FINITE_TOKEN, FailureCode.NUMERIC_ERROR)] * random.choice((0, 0, 1, 3))
    if seed % KILLER_EVERY == 1:
        codes.append((KILLER_TOKEN, FailureCode.ENGINE_LOST))
    return [
        Sent(name, 0, document(id=name, prompt_token_ids=[i, token]), expected=code, document_id=name)
        for i, (token, code) in enumerate(codes)
        for name in [f"hostile-{i}"]
    ]


def _insert(random: Random, sent: list[Sent], others: Sequence[Sent]) -> None:
    for one in others:
        sent.insert(random.randint(0, len(sent)), one)


def _good(i: int, random: Random) -> Sent:
    keys = random.choice(_GOOD)(i)
    name = f"good-{i:04}"
    value = document(id=name, **keys)
    key = name.encode() if random.random() < 0.8 else None
    return Sent(name, 0, value, key=key, truncated=keys.get("task") == "long", document_id=name)


def _with_later_ones(random: Random, sent: Sequence[Sent]) -> list[Sent]:
    """Some documents come again later in their partition, with another prompt: that answer is the one that stays."""
    later = list(sent)
    plain = [one for one in sent if one.document_id and not one.expected and b'"prompt": "' in (one.value or b"")]
    for one in random.sample(plain, min(len(plain), random.choice((0, 0, 3, 20)))):
        message = json.loads(one.value or b"")
        message["prompt"] = f"again: {message['prompt']}"
        again = Sent(one.name + AGAIN, one.partition, json.dumps(message).encode(), one.key, document_id=one.name)
        later.insert(random.randint(later.index(one) + 1, len(later)), again)
    return later


def ways(made: Round) -> str:
    """How the workers reach the servers."""
    kafka = made.security_protocol + (f" {made.sasl_mechanism}" if made.sasl_mechanism else "")
    return f"Kafka {kafka}, Elasticsearch {'TLS' if made.has_tls_node else 'plain'}"


def describe(made: Round) -> str:
    """A round in one line."""
    engine = "real engine" if made.has_real_engine else f"{made.requests_per_step} a step"
    return (
        f"{len(made.sent)} documents, {made.num_partitions} partitions, {made.num_shards} shards, {made.num_workers} "
        f"workers of {made.max_in_flight} in flight, bulks of {made.bulk_documents}, {engine}, {ways(made)}"
    )
