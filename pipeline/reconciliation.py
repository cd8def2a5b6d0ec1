"""Compares the books: the account, the queues where documents stand, and what the source says it has handed out."""

import time
from collections.abc import Callable

from consumers.source import Source
from pipeline.account import Agreement, Totals
from schemas.document import SourcePosition
from schemas.errors import AccountError

SECONDS_BETWEEN = 1.0  # two comparisons
PATIENCE_SECONDS = 20.0  # counts of several threads may differ for a moment, and never for so long
_WAIT_SECONDS = 0.005  # between two looks whether the source has heard of every ending


class Reconciliation:
    """The pipeline's thread's. `num_in_flight` counts the documents place by place; times are seconds of `clock`."""

    def __init__(
        self, source: Source, totals: Totals, num_in_flight: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._source = source
        self._totals = totals
        self._num_in_flight = num_in_flight
        self._clock = clock
        self._next_check = 0.0
        self._balance, self._agreement = Agreement(PATIENCE_SECONDS), Agreement(PATIENCE_SECONDS)

    def check_if_due(self) -> None:
        """`check`, SECONDS_BETWEEN after the last one."""
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + SECONDS_BETWEEN
            self.check()

    def check(self) -> None:
        """Raises AccountError where the books have differed for longer than threads can be out of step: a document was
        lost, which only its next delivery can mend, or counted twice.
        """
        now, totals, source = self._clock(), self._totals, self._source
        num_in_flight = self._num_in_flight()
        in_queues = self._balance.observe(totals.account.imbalance(num_in_flight), now)
        totals.disagreement = self._agreement.observe(source.num_handed_out - self._num_open_now(), now)
        if in_queues or totals.disagreement:
            ledger = totals.ledger
            raise AccountError(
                f"the account does not balance: {ledger.total.sentence(num_in_flight)}, and the source has "
                f"handed out {source.num_handed_out} of which {self._num_open_now()} are open here; {ledger.num_twice} "
                "ended twice. Nothing is lost that is in Kafka: start the worker again, and report this"
            )

    def close(self, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """At the end, with nothing in flight: waits until the source has heard of every ending, and notes what it has
        not heard of."""
        until = time.monotonic() + timeout_seconds
        while (left := self._source.num_handed_out - self._num_open_now()) and time.monotonic() < until:
            time.sleep(_WAIT_SECONDS)
        self._totals.disagreement = self._totals.disagreement or left

    def _num_open_now(self) -> int:
        """Documents that the account has open, of assignments that still hold."""
        is_current = self._source.is_current
        return self._totals.ledger.num_open_in(
            lambda assignment: is_current(SourcePosition(assignment.topic, assignment.partition, 0, assignment.epoch))
        )
