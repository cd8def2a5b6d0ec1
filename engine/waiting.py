"""The requests that wait for their turn in a scheduler, and the prompt tokens that they bring. No torch."""

from collections import Counter, deque
from collections.abc import Callable

from engine.request import Request, RequestState


class WaitingRequests:
    """By priority, then arrival; one that comes back after it ran is the first of its priority.

    Ended ones stay in their queue until they are met at its head, and are counted no more.
    """

    def __init__(self, num_outputs_left: Callable[[Request], int]) -> None:
        """`num_outputs_left`: the most tokens that a request may still be answered with."""
        self.num_waiting = 0
        self.tokens_by_output: Counter[int] = Counter()  # outputs left -> known tokens of those that wait
        self._num_outputs_left = num_outputs_left
        self._queues: dict[int, deque[Request]] = {}  # priority -> requests

    def append(self, request: Request) -> None:
        self._queues.setdefault(request.inference.priority, deque()).append(request)
        self._count(request)

    def put_first(self, request: Request) -> None:
        """Of its priority."""
        self._queues.setdefault(request.inference.priority, deque()).appendleft(request)
        self._count(request)

    def head(self) -> Request | None:
        """The one whose turn is next."""
        for priority in sorted(self._queues, reverse=True):
            requests = self._queues[priority]
            while requests:
                if requests[0].state is RequestState.WAITING:
                    return requests[0]
                requests.popleft()
            del self._queues[priority]
        return None

    def take_head(self, request: Request) -> None:
        """The request, which `head` has just named, waits no more."""
        self._queues[request.inference.priority].popleft()
        self._discount(request)

    def end(self, request: Request) -> None:
        """The request, which waits, ends where it stands."""
        self._discount(request)

    def grow(self, request: Request, token_id: int) -> None:
        """A token that was on its way when the request, which waits, lost its blocks."""
        self._discount(request)
        request.token_ids.append(token_id)
        self._count(request)

    def _count(self, request: Request) -> None:
        self.num_waiting += 1
        self.tokens_by_output[self._num_outputs_left(request)] += len(request.token_ids)

    def _discount(self, request: Request) -> None:
        self.num_waiting -= 1
        output = self._num_outputs_left(request)
        self.tokens_by_output[output] -= len(request.token_ids)
        if not self.tokens_by_output[output]:
            del self.tokens_by_output[output]
