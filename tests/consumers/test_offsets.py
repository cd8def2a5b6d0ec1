"""In-order commit over out-of-order completion, epochs, and what counts as in flight."""

from hypothesis import given
from hypothesis import strategies as st

from consumers.offsets import Commit, OffsetTracker, PartitionTracker
from schemas.document import RawMessage, SourcePosition

P0, P1 = ("documents", 0), ("documents", 1)


def raw(offset: int, epoch: int = 1, partition: int = 0, num_bytes: int = 1) -> RawMessage:
    return RawMessage(SourcePosition("documents", partition, offset, epoch), 0, None, b"x" * num_bytes)


def test_a_late_document_holds_back_the_commit_until_it_completes() -> None:
    tracker = PartitionTracker(epoch=1)
    for offset in (5, 6, 9):  # 7 and 8 were compacted away
        tracker.start(raw(offset))
    tracker.complete(6)
    tracker.complete(9)
    assert tracker.committable == 5
    tracker.complete(5)
    assert tracker.committable == 10


def test_a_commit_may_pass_a_gap_up_to_the_first_document_in_flight() -> None:
    tracker = PartitionTracker(epoch=1)
    tracker.start(raw(5))
    tracker.start(raw(9))
    tracker.complete(5)
    assert tracker.committable == 9


def test_a_raw_message_is_kept_until_its_document_completes_and_no_longer() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    message = raw(3, num_bytes=7)
    tracker.start([message])
    assert tracker.raw(message.position) is message
    assert (tracker.num_in_flight, tracker.num_bytes) == (1, 7)
    assert tracker.complete([message.position, message.position]) == 1
    assert tracker.raw(message.position) is None
    assert (tracker.num_in_flight, tracker.num_bytes) == (0, 0)


def test_a_dropped_partition_takes_its_documents_with_it_and_late_completions_change_nothing() -> None:
    tracker = OffsetTracker()
    assert tracker.assign(P0) == 1
    tracker.start([raw(0, epoch=1), raw(1, epoch=1)])
    assert tracker.drop(P0) == 2
    assert (tracker.num_in_flight, tracker.num_bytes) == (0, 0)
    assert not tracker.is_current(raw(0, epoch=1).position)
    assert tracker.assign(P0) == 2
    tracker.start([raw(0, epoch=2)])
    assert tracker.complete([raw(0, epoch=1).position]) == 0
    assert tracker.commits() == {}
    assert tracker.complete([raw(0, epoch=2).position]) == 1
    assert tracker.commits() == {P0: Commit(1, 2)}


def test_an_acknowledged_commit_is_not_sent_again_and_one_of_an_earlier_epoch_counts_for_nothing() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(4)])
    tracker.complete([raw(4).position])
    commits = tracker.commits()
    assert commits == {P0: Commit(5, 1)}
    assert tracker.commits({P1}) == {}
    tracker.acknowledge(commits)
    assert tracker.commits() == {}
    tracker.drop(P0)
    tracker.assign(P0)
    tracker.start([raw(4, epoch=2)])
    tracker.complete([raw(4, epoch=2).position])
    tracker.acknowledge(commits)
    assert tracker.commits() == {P0: Commit(5, 2)}


def test_what_is_handed_back_is_not_in_flight_and_holds_back_every_later_commit() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(0), raw(1), raw(2), raw(3)])
    tracker.hand_back([raw(2).position, raw(1).position])
    assert tracker.num_in_flight == 2
    tracker.complete([raw(3).position])
    assert tracker.commits() == {}
    tracker.complete([raw(0).position])
    assert tracker.commits() == {P0: Commit(1, 1)}
    assert tracker.num_in_flight == 0


def test_with_nothing_in_flight_the_read_position_passes_a_transactions_end() -> None:
    tracker = PartitionTracker(epoch=1)
    tracker.advance(7)  # nothing was read in this epoch, so nothing is known to be complete
    assert (tracker.committable, tracker.num_in_flight) == (None, 0)
    tracker.start(raw(7))
    tracker.advance(9)
    assert tracker.committable == 7
    tracker.complete(7)
    tracker.advance(9)
    assert tracker.committable == 9


@given(
    gaps=st.lists(st.integers(1, 3), min_size=1, max_size=40),
    data=st.data(),
)
def test_in_any_order_of_completion_commits_grow_and_never_pass_a_document_in_flight(
    gaps: list[int], data: st.DataObject
) -> None:
    offsets = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(offset) for offset in offsets])
    committed, in_flight = offsets[0], set(offsets)
    for offset in data.draw(st.permutations(offsets)):
        tracker.complete([raw(offset).position])
        in_flight.remove(offset)
        for commit in tracker.commits().values():
            assert commit.offset > committed
            assert all(offset >= commit.offset for offset in in_flight)
            committed = commit.offset
        tracker.acknowledge(tracker.commits())
        assert tracker.num_in_flight == tracker.num_bytes == len(in_flight)
    assert committed == offsets[-1] + 1


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["read", "complete", "hand back", "drop", "late"]), st.integers(0, 9)), max_size=60
    )
)
def test_counts_agree_with_what_is_in_flight_over_any_history(steps: list[tuple[str, int]]) -> None:
    tracker = OffsetTracker()
    epoch, next_offset = tracker.assign(P0), 0
    in_flight: list[RawMessage] = []
    gone: list[RawMessage] = []
    for step, choice in steps:
        if step == "read":
            message = raw(next_offset, epoch, num_bytes=choice)
            next_offset += 1
            tracker.start([message])
            in_flight.append(message)
        elif step in ("complete", "hand back") and in_flight:
            message = in_flight.pop(choice % len(in_flight))
            take = tracker.complete if step == "complete" else tracker.hand_back
            take([message.position])
            gone.append(message)
        elif step == "drop":
            tracker.drop(P0)
            gone += in_flight
            in_flight, next_offset = [], choice
            epoch = tracker.assign(P0)
        elif step == "late" and gone:
            assert tracker.complete([gone[choice % len(gone)].position]) == 0
        assert tracker.num_in_flight == len(in_flight)
        assert tracker.num_bytes == sum(message.num_bytes for message in in_flight)
