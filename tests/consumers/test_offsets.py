"""In-order commit over out-of-order completion, epochs, and what counts as in flight."""

from hypothesis import given
from hypothesis import strategies as st

from consumers.commit_metadata import MAX_OFFSETS, OffsetBitmap, Progress
from consumers.offsets import OffsetTracker, PartitionTracker
from schemas.document import RawMessage, SourcePosition, Suspicion

P0, P1 = ("documents", 0), ("documents", 1)


def raw(offset: int, epoch: int = 1, partition: int = 0, num_bytes: int = 1) -> RawMessage:
    return RawMessage(SourcePosition("documents", partition, offset, epoch), 0, None, b"x" * num_bytes)


def to_commit(tracker: OffsetTracker) -> dict[tuple[str, int], tuple[int, int]]:
    """What is to be committed: partition -> (offset, epoch)."""
    return {partition: (commit.offset, commit.epoch) for partition, commit in tracker.commits().items()}


def left(base: int, started: int, *completed: int, crashes: int = 0, clean: bool = False, until: int = 0) -> Progress:
    return Progress(base, started, until, crashes, clean, OffsetBitmap.of(base, completed))


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
    assert to_commit(tracker) == {P0: (0, 2)}
    assert tracker.complete([raw(0, epoch=2).position]) == 1
    assert to_commit(tracker) == {P0: (1, 2)}


def test_an_acknowledged_commit_is_not_sent_again_and_one_of_an_earlier_epoch_counts_for_nothing() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(4)])
    tracker.complete([raw(4).position])
    commits = tracker.commits()
    assert to_commit(tracker) == {P0: (5, 1)}
    assert tracker.commits({P1}) == {}
    tracker.acknowledge(commits)
    assert tracker.commits() == {}
    tracker.drop(P0)
    tracker.assign(P0)
    tracker.start([raw(4, epoch=2)])
    tracker.complete([raw(4, epoch=2).position])
    tracker.acknowledge(commits)
    assert to_commit(tracker) == {P0: (5, 2)}


def test_what_is_handed_back_is_not_in_flight_and_holds_back_every_later_commit() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(0), raw(1), raw(2), raw(3)])
    tracker.hand_back([raw(2).position, raw(1).position])
    assert tracker.num_in_flight == 2
    tracker.complete([raw(3).position])
    assert to_commit(tracker) == {P0: (0, 1)}
    tracker.complete([raw(0).position])
    assert to_commit(tracker) == {P0: (1, 1)}
    assert list(tracker.commits()[P0].progress.completed) == [3]
    assert tracker.num_in_flight == 0


def test_with_nothing_in_flight_the_read_position_passes_a_transactions_end() -> None:
    tracker = PartitionTracker(epoch=1)
    tracker.advance(7)  # nothing is known of where reading began
    assert (tracker.committable, tracker.num_in_flight) == (None, 0)
    tracker.start(raw(7))
    tracker.advance(9)
    assert tracker.committable == 7
    tracker.complete(7)
    tracker.advance(9)
    assert tracker.committable == 9


def test_a_position_beyond_where_reading_began_passes_what_was_aborted_alone() -> None:
    tracker = PartitionTracker(epoch=1, begin=7)
    tracker.advance(7)
    assert tracker.commit() is None
    tracker.advance(9)
    commit = tracker.commit()
    assert commit is not None
    assert commit.offset == 9


def test_what_is_complete_beyond_the_commit_is_told_and_passed_over_by_the_next_owner() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(offset) for offset in range(3, 9)])
    tracker.complete([raw(offset).position for offset in (4, 5, 8)])
    progress = tracker.commits()[P0].progress
    assert progress == left(3, 9, 4, 5, 8)
    after = OffsetTracker()
    after.assign(P0, 3, progress)
    read = after.start([raw(offset) for offset in range(3, 11)])
    assert [message.position.offset for message in read] == [3, 6, 7, 9, 10]
    assert (after.num_in_flight, after.partitions[P0].num_skipped) == (5, 3)
    assert after.started_before(raw(3).position) == 9
    after.complete([raw(offset).position for offset in (3, 6, 7, 9, 10)])
    assert after.commits()[P0].offset == 11


def test_what_was_complete_and_is_not_read_again_yet_is_told_again() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0, 3, left(3, 40, 5, 6, 30))
    tracker.start([raw(3), raw(4), raw(5)])
    tracker.complete([raw(3).position])
    assert tracker.commits()[P0].progress == left(4, 40, 5, 6, 30, crashes=1, until=40)


def test_nothing_more_is_told_once_the_broker_knows_all_and_a_clean_end_is_always_told() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0, 3, None)
    announced = [tracker.is_announced]
    assert tracker.commits(is_clean=True) == {}, "of a partition where nothing was read nothing is known"
    tracker.start([raw(3)])
    announced.append(tracker.is_announced)
    tracker.acknowledge(tracker.commits())
    announced.append(tracker.is_announced)
    assert announced == [True, False, True]
    assert tracker.commits() == {}
    ends = tracker.commits(is_clean=True)
    assert ends[P0].progress == left(3, 4, clean=True)
    tracker.acknowledge(ends)
    assert tracker.commits()[P0].progress == left(3, 4), "the assignment goes on after all"


def test_an_assignment_that_goes_on_behind_its_clean_end_must_be_told_before_more_work_begins() -> None:
    tracker = OffsetTracker()
    epoch = tracker.assign(P0)
    tracker.start([raw(0, epoch)])
    tracker.acknowledge(tracker.commits())
    assert tracker.may_begin(raw(1, epoch).position)
    tracker.acknowledge(tracker.commits(is_clean=True))  # an eager rebalance that gives the partition back
    assert not tracker.is_announced
    assert not tracker.may_begin(raw(1, epoch).position)
    tracker.acknowledge(tracker.commits())
    assert tracker.may_begin(raw(1, epoch).position)


def test_what_the_broker_heard_of_at_a_clean_end_alone_may_not_begin() -> None:
    tracker = OffsetTracker()
    epoch = tracker.assign(P0)
    tracker.start([raw(0, epoch)])
    tracker.acknowledge(tracker.commits(is_clean=True))
    assert not tracker.may_begin(raw(0, epoch).position)
    tracker.acknowledge(tracker.commits())
    assert tracker.may_begin(raw(0, epoch).position)


def test_each_owner_that_dies_with_work_raises_the_count_until_all_of_that_work_is_complete() -> None:
    progress = left(3, 3)
    for num_crashes in range(3):
        tracker = OffsetTracker()
        tracker.assign(P0, 3, progress)
        assert tracker.is_announced == (num_crashes == 0), "the count is told before anything can kill again"
        if num_crashes:
            assert tracker.commits()[P0].progress == left(3, 6, crashes=num_crashes, until=6)
        tracker.start([raw(3), raw(4), raw(5)])
        assert tracker.suspicion(raw(5).position) == (Suspicion(num_crashes) if num_crashes else None)
        progress = tracker.commits()[P0].progress
    tracker.start([raw(6)])
    assert tracker.suspicion(raw(6).position) is None, "it was in no dead worker's hands"
    tracker.complete([raw(3).position, raw(4).position])
    assert tracker.commits()[P0].progress == left(5, 7, crashes=2, until=6)
    handed_over = tracker.commits(is_clean=True)[P0].progress
    after = OffsetTracker()
    after.assign(P0, 5, handed_over)
    after.start([raw(5), raw(6)])
    assert after.suspicion(raw(5).position) == Suspicion(2), "a clean end is no crash, and forgets none"
    tracker.complete([raw(5).position])
    assert tracker.commits()[P0].progress == left(6, 7), "the suspects are through"


def suspicions(progress: Progress, offsets: range = range(3, 11)) -> dict[int, Suspicion | None]:
    """What the next owner of this commit knows of each offset that is not complete."""
    tracker = OffsetTracker()
    tracker.assign(P0, progress.base, progress)
    started = tracker.start([raw(offset) for offset in offsets])
    return {message.position.offset: tracker.suspicion(message.position) for message in started}


def search(lost: range = range(0), alone: int = 0, isolated: range = range(0), clean: bool = False) -> Progress:
    """Three workers died over 3 to 8, of which 5 is complete; 9 and 10 came later."""
    return Progress(3, 11, 9, 3, clean, OffsetBitmap.of(3, [5]), lost, alone, isolated)


def test_after_three_deaths_the_suspects_run_in_halves_apart_from_what_came_later() -> None:
    first, second = Suspicion(3, range(3, 6)), Suspicion(3, range(6, 9))
    assert suspicions(search(clean=True)) == {
        3: first, 4: first, 6: second, 7: second, 8: second, 9: None, 10: None,
    }  # fmt: skip


def test_the_group_that_a_worker_died_with_is_halved_and_the_other_suspects_stay_together() -> None:
    others = Suspicion(4, range(7, 9))
    assert suspicions(search(isolated=range(3, 7))) == {
        3: Suspicion(4, range(3, 4)), 4: Suspicion(4, range(4, 7)), 6: Suspicion(4, range(4, 7)), 7: others, 8: others,
        9: None, 10: None,
    }  # fmt: skip
    assert suspicions(search(lost=range(3, 7), clean=True))[6] == Suspicion(3, range(4, 7)), "known from earlier ones"


def test_a_document_alone_with_dead_workers_is_counted_and_what_was_not_in_the_engine_is_not() -> None:
    once, twice = search(isolated=range(6, 7)), search(range(6, 7), 1, range(6, 7))
    assert suspicions(once)[6] == Suspicion(4, range(6, 7), losses_alone=1)
    assert suspicions(twice)[6] == Suspicion(4, range(6, 7), losses_alone=2)
    assert [suspicions(twice)[offset] for offset in (4, 8, 9)] == [
        Suspicion(4, range(3, 6)),
        Suspicion(4, range(7, 9)),
        None,
    ]
    assert suspicions(search(range(6, 7), 1, range(4, 5)))[4] == Suspicion(4, range(4, 5), losses_alone=1)
    assert suspicions(search(range(6, 7), 1))[6] == Suspicion(4, range(6, 7), losses_alone=1), (
        "it was not in the engine"
    )


def test_a_clean_end_in_the_middle_of_an_isolation_is_no_loss() -> None:
    assert suspicions(search(range(6, 7), 1, range(6, 7), clean=True))[6] == Suspicion(3, range(6, 7), losses_alone=1)


def test_a_group_that_was_lost_and_has_been_answered_all_the_same_leaves_the_others_to_be_searched() -> None:
    assert suspicions(search(range(5, 6), 2))[3] == Suspicion(4, range(3, 7))


def test_one_suspect_is_alone_at_once_and_gaps_between_documents_do_not_matter() -> None:
    progress = Progress(3, 11, 11, 3, True, OffsetBitmap.of(3, [4, 5, 6, 8, 9, 10]))
    assert suspicions(progress) == {3: Suspicion(3, range(3, 7)), 7: Suspicion(3, range(7, 8))}
    assert suspicions(Progress(3, 11, 11, 3, True, OffsetBitmap.of(3, range(4, 11)))) == {3: Suspicion(3, range(3, 4))}


def test_suspects_beyond_what_metadata_can_tell_are_halved_by_their_offsets() -> None:
    far = 10**12
    tracker = OffsetTracker()
    tracker.assign(P0, 0, left(0, far, crashes=3, until=far, clean=True))
    assert tracker.suspicion(raw(0).position) == Suspicion(3, range(far // 2))


def test_what_runs_alone_is_to_be_told_at_once_and_travels_with_its_partition_only() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0, 3, search(clean=True))
    tracker.assign(P1, 0)
    tracker.start([raw(offset) for offset in range(3, 9)] + [raw(0, epoch=2, partition=1)])
    tracker.acknowledge(tracker.commits())
    announced = [tracker.is_announced]
    assert tracker.commits() == {}
    tracker.isolate([raw(3).position, raw(6).position, raw(4).position])
    announced.append(tracker.is_announced)
    commits = tracker.commits()
    assert {partition: commit.progress.isolated for partition, commit in commits.items()} == {P0: range(3, 7)}
    tracker.acknowledge(commits)
    announced.append(tracker.is_announced)
    assert announced == [True, False, True]
    tracker.isolate([raw(3).position, raw(6).position])
    assert tracker.commits() == {}, "the same is not told twice"
    tracker.isolate([raw(0, epoch=2, partition=1).position])
    moved = tracker.commits()
    assert {partition: commit.progress.isolated for partition, commit in moved.items()} == {
        P0: range(0), P1: range(1),
    }  # fmt: skip
    tracker.isolate([raw(3, epoch=7).position])
    assert not any(commit.progress.isolated for commit in tracker.commits().values()), "of an assignment that is gone"


def test_the_search_is_forgotten_once_all_suspects_are_through() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0, 3, search(range(6, 7), 1))
    tracker.start([raw(offset) for offset in range(3, 12)])
    assert tracker.commits()[P0].progress.lost == range(6, 7)
    searched = [tracker.has_suspects]
    tracker.complete([raw(offset).position for offset in range(3, 11)])
    commits = tracker.commits()
    searched.append(tracker.has_suspects)
    assert commits[P0].progress == left(11, 12)
    tracker.acknowledge(commits)
    searched.append(tracker.has_suspects)
    assert searched == [True, True, False], "until the broker knows"


def test_no_work_begins_before_the_broker_knows_that_there_is_some() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(0), raw(1)])
    commits = tracker.commits()
    tracker.start([raw(2)])
    assert not any(tracker.may_begin(raw(offset).position) for offset in range(3))
    tracker.acknowledge(commits)
    assert all(tracker.may_begin(raw(offset).position) for offset in range(3)), "from then on all may"
    assert not tracker.may_begin(raw(0, epoch=2).position)


def test_after_a_death_only_what_the_broker_knows_of_may_begin_until_it_knows_that_the_suspects_are_through() -> None:
    """The next owner knows of no death over anything else, however often its documents kill."""
    tracker = OffsetTracker()
    tracker.assign(P0, 3, left(3, 5, crashes=1))
    begun = []

    def look() -> None:
        begun.append([offset for offset in range(3, 9) if tracker.may_begin(raw(offset).position)])

    def tell() -> None:
        tracker.acknowledge(tracker.commits())
        look()

    tracker.start([raw(offset) for offset in range(3, 6)])
    look()
    tell()
    tracker.start([raw(6)])
    tracker.complete([raw(3).position, raw(4).position])
    look()
    tell()
    assert begun == [[], [3, 4, 5], [3, 4, 5], [3, 4, 5, 6, 7, 8]]


def test_a_window_beyond_what_metadata_holds_is_told_as_far_as_it_goes() -> None:
    tracker = OffsetTracker()
    tracker.assign(P0)
    tracker.start([raw(offset) for offset in range(MAX_OFFSETS + 50)])
    tracker.complete([raw(offset).position for offset in range(1, MAX_OFFSETS + 50)])
    progress = tracker.commits()[P0].progress
    assert list(progress.completed) == list(range(1, MAX_OFFSETS))
    assert progress.started == MAX_OFFSETS + 50


@given(
    completed=st.sets(st.integers(0, 40)),
    in_flight=st.sets(st.integers(0, 40)),
    read_until=st.integers(0, 40),
)
def test_over_two_owners_no_offset_is_called_complete_that_was_not_and_none_is_forgotten(
    completed: set[int], in_flight: set[int], read_until: int
) -> None:
    first = OffsetTracker()
    first.assign(P0, 0)
    first.start([raw(offset) for offset in range(41)])
    first.complete([raw(offset).position for offset in completed - {40}])
    progress = first.commits()[P0].progress
    second = OffsetTracker()
    second.assign(P0, progress.base, progress)
    read = second.start([raw(offset) for offset in range(progress.base, max(read_until, progress.base + 1))])
    second.complete([message.position for message in read if message.position.offset not in in_flight])
    commit = second.commits()[P0]
    done = completed - {40} | {m.position.offset for m in read if m.position.offset not in in_flight}
    assert {*range(commit.offset), *commit.progress.completed} == done | set(range(commit.offset))
    assert set(range(commit.offset)) <= done


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
            assert commit.offset >= committed
            assert all(offset >= commit.offset for offset in in_flight)
            committed = commit.offset
            assert in_flight.isdisjoint(commit.progress.completed)
            assert set(offsets) - in_flight <= {*range(committed), *commit.progress.completed}
            assert commit.progress.started == offsets[-1] + 1
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
