"""Outputs of the engine become rows, dead letters, or another try; what that took is counted."""

from collections.abc import Callable, Sequence
from datetime import datetime

from pipeline.account import Totals
from pipeline.outgoing import OutgoingRows
from pipeline.prompts import derived_seed
from pipeline.results import ACTIONS, Action
from pipeline.rows import Row, RowBuilder, Work
from schemas.errors import Failure
from schemas.inference import InferenceOutput


class Answers:
    """The pipeline's thread's. `wall_clock` is what second tries' deadlines are compared with."""

    def __init__(
        self, rows: RowBuilder, outgoing: OutgoingRows, totals: Totals, wall_clock: Callable[[], datetime]
    ) -> None:
        self._rows_of = rows
        self._outgoing = outgoing
        self._totals = totals
        self._wall_clock = wall_clock

    def take(self, ended: Sequence[tuple[Work, InferenceOutput]], now: float) -> list[Work]:
        """Sends each on its way, and returns those that are to run again, prepared for that."""
        self._count(ended, now)
        rows: list[Row] = []
        again: list[Work] = []
        answered_at = self._wall_clock()
        for work, output in ended:
            work.tries += 1
            answer = self._rows_of.read(work, output)
            if answer.failure is not None and _runs_again(work, answer.failure, answered_at):
                again.append(work)
                continue
            row = self._rows_of.answer_row(work, answer, output, now, answered_at)
            if answer.failure is None:
                rows.append(row)
            else:
                self._outgoing.fail(row, answer.failure)
        self._outgoing.add(rows)
        return again

    def _count(self, ended: Sequence[tuple[Work, InferenceOutput]], now: float) -> None:
        totals, parts = self._totals, self._totals.time
        totals.prompt_tokens += sum([output.num_prompt_tokens for _, output in ended])
        totals.cached_tokens += sum([output.num_cached_tokens for _, output in ended])
        totals.completion_tokens += sum([len(output.token_ids) for _, output in ended])
        parts.num_answered += len(ended)
        parts.waiting += sum([work.submitted - work.arrived for work, _ in ended])
        parts.engine += sum([now - work.submitted for work, _ in ended])
        parts.engine_queue += sum([output.timing.queue_ms for _, output in ended]) / 1000
        parts.engine_prefill += sum([output.timing.prefill_ms for _, output in ended]) / 1000
        parts.engine_decode += sum([output.timing.decode_ms for _, output in ended]) / 1000


def _runs_again(work: Work, failure: Failure, answered_at: datetime) -> bool:
    """Whether the table wants another try, and the deadline leaves time for it; prepares the work for that."""
    if ACTIONS[failure.code] is not Action.RETRY_ONCE or work.tries > 1 or work.prepared.sampling.is_greedy:
        return False
    document = work.prepared.document
    if document.message.deadline is not None and document.message.deadline <= answered_at:
        return False
    work.prepared.seed = derived_seed(document.identity, attempt=work.tries)
    return True
