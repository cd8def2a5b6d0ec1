"""Says once that Kafka is away, and why, and once that it is back. Knows the client by how long it was not answered."""

import gc
import logging
from collections.abc import Callable

from consumers.connection import check_connection
from schemas.errors import SourceError
from schemas.settings import KafkaSettings

logger = logging.getLogger(__name__)

SILENT_SECONDS = 10.0  # twice as long as the client lets pass between two of its questions
_PROBE_SECONDS = 3.0  # for an answer to a new connection


class OutageWatch:
    """The clients go on trying for ever and tell only of single connections.

    A silence may also be ours, on a processor that is busy: so a new connection is tried before Kafka is called away,
    which gives the reason too.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        clock: Callable[[], float],
        probe: Callable[[KafkaSettings], object] = check_connection,
    ) -> None:
        seconds = min(_PROBE_SECONDS, settings.connect_timeout_seconds)
        self._settings = settings.model_copy(update={"connect_timeout_seconds": seconds})
        self._clock = clock
        self._probe = probe
        self._away_since: float | None = None
        self._reason = ""
        self._next_probe = clock()

    @property
    def is_away(self) -> bool:
        return self._away_since is not None

    def look(self, silent_seconds: float) -> None:
        """To be called often, with how long no broker has answered. Takes seconds where that is long."""
        now = self._clock()
        if silent_seconds < SILENT_SECONDS:
            if self._away_since is not None:
                logger.warning("Kafka is back", extra={"away_seconds": round(now - self._away_since, 1)})
                self._away_since, self._reason = None, ""
            return
        if now < self._next_probe:
            return
        try:
            self._probe(self._settings)
        except SourceError as error:
            if str(error) != self._reason:  # at first, and where it changes, as from a crash to a refusal
                self._reason = str(error)
                extra = {"reason": self._reason, "silent_seconds": round(silent_seconds, 1)}
                logger.error("Kafka is away; what is in flight is held until it is back", extra=extra)
            if self._away_since is None:
                self._away_since = now - silent_seconds
        # kafka-python 3.0.12 leaves each failed connection's socket open in a reference cycle, one every two seconds.
        gc.collect()
        self._next_probe = self._clock() + SILENT_SECONDS
