"""An Elasticsearch that fails on cue, in memory: for verdicts that a real node cannot be made to give on demand.

It knows bulk with external versions, and mget. What it says is what the real node was seen to say.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import orjson
from elastic_transport import ApiResponseMeta, HttpHeaders, NodeConfig, ObjectApiResponse
from elasticsearch import ApiError, Elasticsearch
from elasticsearch.exceptions import HTTP_EXCEPTIONS

from pipeline.index import RESULTS_MAPPING

# What happens to one call: an exception, or a function from a row's action to (status, error type) or None (as usual).
Cue = Exception | Callable[[dict[str, Any]], tuple[int, str] | None]


class FakeElasticsearch:
    """`on_bulk.append(cue)` for the calls to come, in order; without one a call succeeds."""

    def __init__(self) -> None:
        self.on_bulk: deque[Cue] = deque()
        self.on_mget: deque[Exception] = deque()
        self.bulk_sizes: list[int] = []
        self.mget_sizes: list[int] = []
        self.max_body_bytes: int | None = None
        self.poison_ids: set[str] = set()  # the whole call gets 400 where one of its rows has such an _id
        self.stored: dict[str, tuple[int, dict[str, Any]]] = {}  # _id -> version, source
        self.cluster = _HealthyCluster()
        self.indices = _MadeIndices()

    def as_client(self) -> Elasticsearch:
        return cast(Elasticsearch, self)

    def options(self, **_: Any) -> "FakeElasticsearch":
        return self

    def bulk(self, *, operations: bytes, **_: Any) -> ObjectApiResponse[Any]:
        lines = [orjson.loads(line) for line in operations.splitlines()]
        rows = list(zip(lines[::2], lines[1::2], strict=True))
        self.bulk_sizes.append(len(rows))
        cue = self.on_bulk.popleft() if self.on_bulk else None
        if isinstance(cue, Exception):
            raise cue
        if self.max_body_bytes is not None and len(operations) > self.max_body_bytes:
            raise api_error(413)
        if any(action["index"]["_id"] in self.poison_ids for action, _ in rows):
            raise api_error(400, "action_request_validation_exception", "id is too long")
        entries = [self._write(action["index"], source, cue) for action, source in rows]
        errors = any("error" in entry for entry in entries)
        return _reply({"errors": errors, "items": [{"index": entry} for entry in entries]})

    def _write(self, action: dict[str, Any], source: dict[str, Any], cue: Cue | None) -> dict[str, Any]:
        told = cue(action) if callable(cue) else None
        if told is not None:
            return {"status": told[0], "error": {"type": told[1], "reason": "on cue"}}
        version, _ = self.stored.get(action["_id"], (-1, {}))
        if version >= action["version"]:
            return {"status": 409, "error": {"type": "version_conflict_engine_exception", "reason": "higher or equal"}}
        self.stored[action["_id"]] = action["version"], source
        return {"status": 201}

    def mget(self, *, docs: Sequence[dict[str, str]], **_: Any) -> ObjectApiResponse[Any]:
        self.mget_sizes.append(len(docs))
        if self.on_mget:
            raise self.on_mget.popleft()
        found = []
        for wanted in docs:
            version, source = self.stored.get(wanted["_id"], (None, {}))
            found.append({"found": version is not None, "_version": version, "_source": source})
        return _reply({"docs": found})


class _HealthyCluster:
    def health(self, **_: Any) -> ObjectApiResponse[Any]:
        return _reply({"status": "green"})


class _MadeIndices:
    """Every alias is there, on an index with `mapping`: ours."""

    def __init__(self) -> None:
        self.mapping = RESULTS_MAPPING
        self.on_get_mapping: deque[Exception] = deque()

    def get_alias(self, *, name: str) -> ObjectApiResponse[Any]:
        return _reply({f"{name}-v1": {"aliases": {name: {"is_write_index": True}}}})

    def get_mapping(self, *, index: str) -> ObjectApiResponse[Any]:
        if self.on_get_mapping:
            raise self.on_get_mapping.popleft()
        return _reply({index: {"mappings": self.mapping}})


def api_error(status: int, error_type: str = "", reason: str = "on cue", **headers: str) -> ApiError:
    """As the client raises it. Without a type the body is text, as a proxy's or the HTTP layer's is."""
    body: Any = {"error": {"type": error_type, "reason": reason}, "status": status} if error_type else reason
    kind = HTTP_EXCEPTIONS.get(status, ApiError)
    return kind(
        message=error_type or reason,
        meta=_meta(status, {k.replace("_", "-"): v for k, v in headers.items()}),
        body=body,
    )


def _meta(status: int, headers: dict[str, str]) -> ApiResponseMeta:
    return ApiResponseMeta(status, "1.1", HttpHeaders(headers), 0.0, NodeConfig("http", "localhost", 9200))


def _reply(body: dict[str, Any]) -> ObjectApiResponse[Any]:
    return ObjectApiResponse(body=body, meta=_meta(200, {}))
