"""Which documents may have killed the engine, and who of them may run next. Decides by id; runs nothing. Where the
worker dies with the engine, pipeline/isolation.py searches.

A lost engine says nothing of the cause. What it had in it is suspected and runs again in halves, each alone in the
engine: a half that is answered is innocent, one that loses the engine again is halved again, down to one document.

    lost with 1 2 3 4 5 6 7 8  ──>  1 2 3 4 | 5 6 7 8      | marks a group; the first one runs, the others wait
    1 2 answered, lost         ──>  3 | 4 | 5 6 7 8
    lost                       ──>  3 | 4 | 5 6 7 8        3 was alone: once may be chance
    lost                       ──>  4 | 5 6 7 8            3 is convicted
    4, then 5 6 7 8 answered   ──>  nobody is suspected: documents flow again

Each of k killers among n documents costs at most ceil(log2 n) + 2 engines (group testing by halving:
https://en.wikipedia.org/wiki/Group_testing). Losses without a culprit (somebody's kill, memory that ran out outside)
only split groups.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from schemas.errors import EngineError, Failure, FailureCode, Stage

LOSSES_ALONE = 2  # that convict: one may come from outside, or from what an aborted request left in the engine


@dataclass(frozen=True, slots=True)
class Loss:
    """What a lost engine taught."""

    convicted: int | None = None  # the request that has now been alone with a lost engine often enough
    is_of_suspects: bool = False  # it ran nothing but suspects: the search has come nearer to its end


class Suspects:
    """By request id. `is_active`: nobody but the group that `next_group` gave may be in the engine."""

    def __init__(self) -> None:
        self.is_active = False
        self._waiting: list[Sequence[int]] = []  # groups; the last one runs next
        self._losses_alone: Counter[int] = Counter()

    @property
    def num_waiting(self) -> int:
        """Suspects that are not in the engine."""
        return sum(len(group) for group in self._waiting)

    def waiting(self) -> set[int]:
        """Those, by id."""
        return {request_id for group in self._waiting for request_id in group}

    def next_group(self, num_in_engine: int) -> Sequence[int]:
        """Who may go to the engine now: nobody until it is empty, and a group's last answer or loss came first.

        Ends the search where nobody is left.
        """
        if num_in_engine:
            return ()
        if not self._waiting:
            self.is_active = False
            self._losses_alone.clear()
            return ()
        return self._waiting.pop()

    def lost(self, in_engine: Sequence[int]) -> Loss:
        """The engine was lost with these in it, in the order in which they were submitted."""
        was_active = self.is_active
        if not in_engine:
            return Loss()
        self.is_active = True
        if len(in_engine) == 1:
            (alone,) = in_engine
            self._losses_alone[alone] += 1
            if self._losses_alone[alone] >= LOSSES_ALONE:
                del self._losses_alone[alone]
                return Loss(convicted=alone, is_of_suspects=was_active)
            self._waiting.append((alone,))
        else:
            half = (len(in_engine) + 1) // 2
            self._waiting += [in_engine[half:], in_engine[:half]]
        return Loss(is_of_suspects=was_active)

    def forget(self, request_ids: Collection[int]) -> None:
        """These were dropped: somebody else runs them."""
        gone = set(request_ids)
        kept = [[one for one in group if one not in gone] for group in self._waiting]
        self._waiting = [group for group in kept if group]

    def clear(self) -> None:
        """All were dropped."""
        self._waiting.clear()
        self._losses_alone.clear()
        self.is_active = False


def conviction(num_prompt_tokens: int, max_tokens: int, cause: EngineError) -> Failure:
    """What the row and the dead letter of a document say that kills the engine; `cause` is its last end."""
    return Failure(
        FailureCode.ENGINE_LOST,
        Stage.ENGINE,
        f"the engine was lost {LOSSES_ALONE} times while it ran this document and nothing else ({num_prompt_tokens} "
        f"tokens of prompt, at most {max_tokens} of answer), the last time because {cause}; other documents went on",
    )
