"""Suspects: exact groups on small cases, and what holds for any documents with any killers among them."""

from collections.abc import Sequence
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.suspects import LOSSES_ALONE, Loss, Suspects


def groups_to_the_end(suspects: Suspects) -> list[list[int]]:
    """All groups, each answered before the next."""
    groups = []
    while group := suspects.next_group(0):
        groups.append(list(group))
    return groups


def test_what_was_lost_together_runs_again_in_halves_in_the_same_order() -> None:
    suspects = Suspects()
    assert suspects.lost([1, 2, 3, 4, 5]) == Loss()
    assert (suspects.num_waiting, suspects.waiting()) == (5, {1, 2, 3, 4, 5})
    assert groups_to_the_end(suspects) == [[1, 2, 3], [4, 5]]
    assert not suspects.is_active


def test_a_group_waits_until_the_engine_is_empty_and_the_last_one_still_counts_as_a_search() -> None:
    suspects = Suspects()
    suspects.lost([1, 2])
    assert suspects.next_group(0) == [1]
    assert suspects.next_group(1) == ()
    assert suspects.next_group(0) == [2]
    assert suspects.next_group(1) == ()
    assert suspects.is_active  # 2 is alone in the engine, and nobody may join it
    assert suspects.next_group(0) == ()
    assert not suspects.is_active


def test_what_is_left_of_a_half_is_halved_again_before_the_other_half_runs() -> None:
    suspects = Suspects()
    suspects.lost([1, 2, 3, 4, 5, 6, 7, 8])
    assert suspects.next_group(0) == [1, 2, 3, 4]
    assert suspects.lost([3, 4]) == Loss(is_of_suspects=True)  # 1 and 2 were answered
    assert groups_to_the_end(suspects) == [[3], [4], [5, 6, 7, 8]]


def test_a_document_is_convicted_by_the_second_loss_alone_and_not_by_the_first() -> None:
    suspects = Suspects()
    assert suspects.lost([7]) == Loss()
    assert suspects.next_group(0) == (7,)
    assert suspects.lost([7]) == Loss(convicted=7, is_of_suspects=True)
    assert suspects.next_group(0) == ()
    assert not suspects.is_active


def test_an_engine_that_is_lost_while_idle_makes_nobody_suspect() -> None:
    suspects = Suspects()
    assert suspects.lost([]) == Loss()
    assert not suspects.is_active


def test_who_was_dropped_is_suspected_no_more() -> None:
    suspects = Suspects()
    suspects.lost([1, 2, 3, 4])
    suspects.forget([1, 2, 4])
    assert groups_to_the_end(suspects) == [[3]]
    suspects.lost([1, 2])
    suspects.clear()
    assert (suspects.is_active, suspects.num_waiting, groups_to_the_end(suspects)) == (False, 0, [])


class Simulation:
    """An engine of three slots that answers in any order, and documents that keep arriving: `data` decides when."""

    def __init__(self, data: st.DataObject, num_documents: int, killers: set[int]) -> None:
        self.data = data
        self.killers = killers
        self.arriving = list(range(num_documents))
        self.running: list[int] = []  # submitted or suspected, not ended
        self.suspects = Suspects()
        self.answered: list[int] = []
        self.convicted: list[int] = []
        self.num_losses = 0
        self.largest = 1

    def in_engine(self) -> list[int]:
        waiting = self.suspects.waiting()
        return [one for one in self.running if one not in waiting]

    def feed(self) -> None:
        if not self.suspects.is_active and self.arriving:
            count = self.data.draw(st.integers(1, len(self.arriving)))
            fed, self.arriving = self.arriving[:count], self.arriving[count:]
            self.running += fed
        if self.suspects.is_active:
            self.suspects.next_group(len(self.in_engine()))

    def turn(self) -> None:
        """Some answers, then perhaps a loss, by a killer that runs."""
        self.feed()
        inside = self.in_engine()
        self.largest = max(self.largest, len(inside))
        innocent = [one for one in inside if one not in self.killers]
        for one in self.data.draw(st.permutations(innocent))[: self.data.draw(st.integers(0, 3))]:
            self.end(one, self.answered)
        if not self.killers.isdisjoint(inside) and self.data.draw(st.booleans()):
            self.lose()

    def end(self, one: int, to: list[int]) -> None:
        self.running.remove(one)
        to.append(one)

    def lose(self) -> None:
        self.num_losses += 1
        inside = self.in_engine()
        loss = self.suspects.lost(inside)
        if loss.convicted is not None:
            assert inside == [loss.convicted]
            self.end(loss.convicted, self.convicted)

    def finish(self) -> None:
        """Everything that can happen happens: terminates, or a document is never run."""
        while self.arriving or self.running:
            self.feed()
            inside = self.in_engine()
            assert inside or not self.running, f"{self.running} wait for ever"
            self.largest = max(self.largest, len(inside))
            for one in [one for one in inside if one not in self.killers]:
                self.end(one, self.answered)
            if self.in_engine():
                self.lose()


@given(st.data(), st.integers(1, 40), st.integers(0, 12))
def test_every_killer_is_convicted_alone_and_every_innocent_answered_within_bounded_losses(
    data: st.DataObject, num_documents: int, num_turns: int
) -> None:
    killers = data.draw(st.sets(st.integers(0, num_documents - 1)))
    simulation = Simulation(data, num_documents, killers)
    for _ in range(num_turns):
        simulation.turn()
    simulation.finish()
    assert sorted(simulation.convicted) == sorted(killers)
    assert sorted(simulation.answered) == sorted(set(range(num_documents)) - killers)
    assert simulation.num_losses <= len(killers) * (ceil(log2(simulation.largest)) + LOSSES_ALONE)


@given(st.data(), st.integers(1, 40), st.integers(1, 12))
def test_losses_without_a_culprit_convict_nobody_who_was_not_alone_twice(
    data: st.DataObject, num_documents: int, num_turns: int
) -> None:
    simulation = Simulation(data, num_documents, set())
    hit_alone: list[int] = []
    for _ in range(num_turns):
        simulation.turn()
        inside = simulation.in_engine()
        if len(inside) > 1 or (inside and inside[0] not in hit_alone):
            hit_alone += inside[:1] if len(inside) == 1 else []
            simulation.lose()
    simulation.finish()
    assert simulation.convicted == []
    assert sorted(simulation.answered) == list(range(num_documents))


@pytest.mark.parametrize("num_documents", [2, 3, 64, 512])
def test_one_killer_among_many_costs_its_path_to_the_bottom(num_documents: int) -> None:
    for killer in {0, num_documents // 2, num_documents - 1}:
        suspects, waiting, num_losses = Suspects(), set(range(num_documents)), 0
        group: Sequence[int] = range(num_documents)
        while group:
            if killer in group:  # at once, before anybody is answered
                num_losses += 1
                if suspects.lost(group).convicted == killer:
                    waiting.discard(killer)
            else:
                waiting -= set(group)
            group = suspects.next_group(0)
        assert not waiting
        assert num_losses <= ceil(log2(num_documents)) + LOSSES_ALONE
