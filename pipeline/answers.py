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
        # In one pass and in plain numbers: documents are many, and what each is made of is cold by now.
        prompt = cached = completion = 0
        waiting = engine = queue = prefill = decode = 0.0
        for work, output in ended:
            prompt += output.num_prompt_tokens
            cached += output.num_cached_tokens
            completion += len(output.token_ids)
            submitted = work.submitted
            waiting += submitted - work.arrived
            engine += now - submitted
            queue_ms, prefill_ms, decode_ms = output.timing
            queue += queue_ms
            prefill += prefill_ms
            decode += decode_ms
        totals, parts = self._totals, self._totals.time
        totals.prompt_tokens += prompt
        totals.cached_tokens += cached
        totals.completion_tokens += completion
        parts.num_answered += len(ended)
        parts.waiting += waiting
        parts.engine += engine
        parts.engine_queue += queue / 1000
        parts.engine_prefill += prefill / 1000
        parts.engine_decode += decode / 1000


def _runs_again(work: Work, failure: Failure, answered_at: datetime) -> bool:
    """Whether the table wants another try, and the deadline leaves time for it; prepares the work for that."""
    if ACTIONS[failure.code] is not Action.RETRY_ONCE or work.tries > 1 or work.prepared.sampling.is_greedy:
        return False
    document = work.prepared.document
    if document.message.deadline is not None and document.message.deadline <= answered_at:
        return False
    work.prepared.seed = derived_seed(document.identity, attempt=work.tries)
    return True
