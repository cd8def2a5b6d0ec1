"""Whether Elasticsearch answers, for /readyz."""

import threading
import time

from elastic_transport import TransportError
from elasticsearch import ApiError, Elasticsearch

HEALTH_SECONDS = 2.0  # an answer is waited for, and good, for so long


class ElasticsearchHealth:
    """Asks at most every HEALTH_SECONDS, whoever wants to know. From any thread."""

    def __init__(self, client: Elasticsearch) -> None:
        self._client = client.options(request_timeout=HEALTH_SECONDS)
        self._checked = -HEALTH_SECONDS
        self._lacks: str | None = None
        self._lock = threading.Lock()

    def lacks(self) -> str | None:
        """What it lacks, in words; None where it answers."""
        with self._lock:
            if time.monotonic() - self._checked >= HEALTH_SECONDS:
                self._lacks = self._ask()
                self._checked = time.monotonic()
            return self._lacks

    def _ask(self) -> str | None:
        try:
            self._client.cluster.health()
        except ApiError as error:
            # It may refuse to tell its health to us and take our rows all the same.
            return None if error.meta.status == 403 else f"it answers {error.meta.status}"
        except TransportError as error:
            return f"not reachable: {type(error).__name__}"
        return None
