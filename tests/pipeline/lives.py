"""Lives of workers in memory: a broker that keeps commits, rows that are stored with delay, and deaths at random.

The flow, the isolation, the trackers and the commits' metadata are the real ones; only processes and servers are not.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from consumers.commit_metadata import decode, encode
from consumers.offsets import OffsetTracker, Partition
from pipeline.flow import Flow
from pipeline.prompts import PromptBuilder, compile_tasks
from pipeline.results import WorkerIdentity
from pipeline.retry import Verdict
from pipeline.rows import Row, RowBuilder
from pipeline.supervisor import EngineSupervisor
from schemas.document import Assignment, Document, DocumentResult, RawMessage, RejectedDocument, SourcePosition
from schemas.errors import EngineError, Failure
from schemas.inference import EngineInfo, EngineStats, InferenceOutput, InferenceRequest
from tests import fake_engine
from tests.pipeline.parts import ByteTokenizer, engine_info, make_document

TOPIC, TOPIC_ID = "documents", UUID(int=7)
MAX_IN_FLIGHT, MAX_RUNNING = 12, 6
_TASKS = compile_tasks({}, ByteTokenizer())


class Died(BaseException):
    """The worker's process has ended on the spot, and its engine with it."""


class World:
    """What outlives a worker. A document is called by its partition and offset; `killers` maps some to what they end:
    "worker" (with its engine), "engine", or "either" as it happens."""

    def __init__(self, num_documents: Sequence[int], killers: Mapping[str, str], num_outside: int, seed: int) -> None:
        self.num_documents = num_documents  # by partition
        self.killers = killers
        self.num_outside = num_outside  # deaths of workers from outside that are still to come, at most
        self.tells_reads = False  # each read is committed before its documents go on; else the first one of each life
        self.random = random.Random(seed)
        self.commits: dict[Partition, tuple[int, str]] = {}
        self.rows: dict[str, DocumentResult] = {}
        self.dead_letters: set[str] = set()
        self.num_deaths = 0
        self.hit_alone: Counter[str] = Counter()  # from outside, while it was noted as alone

    @property
    def is_done(self) -> bool:
        return all(self.committed(partition) == number for partition, number in enumerate(self.num_documents))

    def committed(self, partition: int) -> int:
        return self.commits.get((TOPIC, partition), (0, ""))[0]

    def noted(self, partitions: Iterable[int]) -> list[tuple[int, range]]:
        """What the next owners of these would find to have been alone in an engine, were they to be had now."""
        noted = []
        for partition in partitions:
            left = decode(self.commits.get((TOPIC, partition), (0, ""))[1])
            if left is not None and not left[1].is_clean and left[1].started > left[1].base and left[1].isolated:
                noted.append((partition, left[1].isolated))
        return noted

    def live(self, partitions: Sequence[int], ends_after_turns: int = 10**6) -> None:
        """One worker's life with these partitions: until it dies, or all is done, or it is told to end."""
        life = Life(self, partitions, ends_after_turns)
        try:
            life.run()
        except Died:
            self.num_deaths += 1

    def die_from_outside(self, partitions: Iterable[int]) -> None:
        self.num_outside -= 1
        for partition, offsets in self.noted(partitions):
            if len(offsets) == 1:
                self.hit_alone[f"{partition}-{offsets[0]}"] += 1
        raise Died


class Life:
    """A worker. Its engine answers in any order; its rows are durable some turns after they were made."""

    def __init__(self, world: World, partitions: Sequence[int], ends_after_turns: int) -> None:
        self.world = world
        self.source = BrokerSource(world, partitions)
        self._partitions = partitions
        self._storing: list[Row] = []
        self._in_engine: dict[int, InferenceRequest] = {}
        self._turns_left = ends_after_turns
        self.stats = EngineStats()
        self.flow = Flow(
            self.source,
            self,
            EngineSupervisor(self._start, 10**6, backoff_seconds=0.0),
            lambda info: PromptBuilder(_TASKS, ByteTokenizer(), info),
            RowBuilder(_TASKS, WorkerIdentity("worker", "model"), "tokenizer", receipts=False),
            max_running=MAX_RUNNING,
            max_tokens_per_step=16,
            urgent_after_seconds=300.0,
        )

    def run(self) -> None:
        self.flow.open_engine()
        self.flow.run(until_drained=True, on_turn=self._turn)
        account = self.flow.totals.account
        assert (self.flow.num_in_flight, account.imbalance(0)) == (0, 0)
        self.source.close()

    def _turn(self) -> None:
        draw = self.world.random.random
        if self.world.num_outside and draw() < 0.05:
            self.world.die_from_outside(self._partitions)
        self._turns_left -= 1
        if self._turns_left == 0:
            self.flow.request_drain(1e6)
        if draw() < 0.5 or self.flow.is_asked_to_drain:
            self.flush()
        if draw() < 0.3:
            self.source.commit()
        if draw() < 0.02:
            self.source.move(self.world.random)
            self.flow.drop_what_is_not_ours()

    # The sink.

    has_room = True

    def put_many(self, rows: Sequence[Row]) -> None:
        self._storing += rows

    def flush(self) -> None:
        rows, self._storing = self._storing, []
        for result, _, position, _ in rows:
            verdict = Verdict.ALREADY_DONE if result.id in self.world.rows else Verdict.STORED
            self.world.rows.setdefault(result.id, result)
            self.flow.outgoing.acknowledged([position], verdict)

    def check(self) -> None: ...

    # The engine.

    def _start(self) -> tuple["Life", EngineInfo]:
        self._in_engine.clear()
        self.stats = EngineStats()
        return self, engine_info()

    def submit(self, requests: Sequence[InferenceRequest]) -> None:
        self._in_engine |= {request.request_id: request for request in requests}
        num_tokens = sum(len(request.token_ids) for request in requests)
        self.stats = EngineStats(num_begun_tokens=self.stats.num_begun_tokens + num_tokens)
        if noted := self.world.noted(self._partitions):
            ((partition, offsets),) = noted
            apart = {f"{partition}-{offset}" for offset in offsets}
            assert {_name(request) for request in self._in_engine.values()} <= apart, "others are in the engine"

    def expect(self, beyond: Mapping[int, int] | None) -> None: ...

    def abort(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._in_engine.pop(request_id, None)

    def poll(self, timeout_seconds: float) -> list[InferenceOutput]:
        inside = list(self._in_engine.values())
        outputs = []
        for request in self.world.random.sample(inside, self.world.random.randint(0, len(inside))):
            ends = self.world.killers.get(_name(request))
            if ends == "either":
                ends = self.world.random.choice(["worker", "engine"])
            if ends == "worker":
                raise Died
            if ends == "engine":
                raise EngineError("it was killed")
            del self._in_engine[request.request_id]
            outputs.append(fake_engine.answer(request))
        return outputs

    def close(self) -> None: ...


class BrokerSource:
    """A Source over the world's partitions, as KafkaSource is over a broker's, without its threads."""

    def __init__(self, world: World, partitions: Sequence[int]) -> None:
        self._world = world
        self._tracker = OffsetTracker()
        self._next: dict[int, int] = {}  # partition -> the offset to be read
        self._is_draining = False
        self._skipped: Counter[Assignment] = Counter()
        for partition in partitions:
            self._assign(partition)

    def _assign(self, partition: int) -> None:
        offset, text = self._world.commits.get((TOPIC, partition), (0, ""))
        left = decode(text)
        self._tracker.assign((TOPIC, partition), offset, None if left is None else left[1])
        self._next[partition] = offset

    def move(self, rng: random.Random) -> None:
        """A partition goes, in order, and comes back under another epoch."""
        partition = rng.choice(list(self._next))
        self.commit([(TOPIC, partition)], is_clean=True)
        self._tracker.drop((TOPIC, partition))
        self._assign(partition)

    def commit(self, partitions: Sequence[Partition] | None = None, is_clean: bool = False) -> None:
        commits = self._tracker.commits(partitions, is_clean)
        for partition, commit in commits.items():
            self._world.commits[partition] = commit.offset, encode(commit.progress, TOPIC_ID)
        self._tracker.acknowledge(commits)

    def start(self) -> None: ...

    def poll(self, max_documents: int, timeout_seconds: float) -> list[Document | RejectedDocument]:
        documents: list[Document | RejectedDocument] = []
        if not self._is_draining:
            for partition, offset in self._next.items():
                documents += self._read(partition, offset)
        if not self._tracker.is_announced or (documents and self._world.tells_reads):
            self.commit()
        return documents

    def _read(self, partition: int, offset: int) -> list[Document]:
        epoch = self._tracker.partitions[TOPIC, partition].epoch
        room = max(0, MAX_IN_FLIGHT - self._tracker.num_in_flight)
        end = min(self._world.num_documents[partition], offset + room)
        self._next[partition] = end
        positions = [SourcePosition(TOPIC, partition, one, epoch) for one in range(offset, end)]
        started = self._tracker.start([RawMessage(position, 0, None, b"") for position in positions])
        if num_skipped := len(positions) - len(started):
            self._skipped[positions[0].assignment] += num_skipped
        documents = []
        for raw in started:
            name = f"{partition}-{raw.position.offset}"
            document = make_document(raw.position.offset, partition, epoch, id=name, prompt=name)
            documents.append(document._replace(suspicion=self._tracker.suspicion(raw.position)))
        return documents

    def dead_letter(self, position: SourcePosition, job: str, failure: Failure, then: Callable[[], None]) -> None:
        if self.is_current(position):
            self._world.dead_letters.add(f"{position.partition}-{position.offset}")
            then()

    def complete(self, positions: Sequence[SourcePosition]) -> None:
        self._tracker.complete(positions)

    def hand_back(self, positions: Sequence[SourcePosition]) -> None:
        self._tracker.hand_back(positions)

    def take_skipped(self) -> Counter[Assignment]:
        skipped, self._skipped = self._skipped, Counter()
        return skipped

    def started_before(self, position: SourcePosition) -> int:
        return self._tracker.started_before(position)

    def isolate(self, positions: Sequence[SourcePosition]) -> None:
        self._tracker.isolate(positions)
        self.commit()

    def expect_no_clean_end(self) -> None:
        raise AssertionError("no engine is given up here")

    def is_current(self, position: SourcePosition) -> bool:
        return self._tracker.is_current(position)

    @property
    def has_assignment(self) -> bool:
        return True

    @property
    def is_paused(self) -> bool:
        return False

    @property
    def num_in_flight(self) -> int:
        return self._tracker.num_in_flight

    @property
    def num_handed_out(self) -> int:
        return self._tracker.num_in_flight

    def is_drained(self) -> bool:
        is_read = all(offset == self._world.num_documents[partition] for partition, offset in self._next.items())
        return is_read and not self._tracker.num_in_flight

    def drain(self) -> None:
        self._is_draining = True

    def close(self) -> None:
        self.commit(is_clean=True)


def _name(request: InferenceRequest) -> str:
    return bytes(list(request.token_ids)).decode()
