"""The results index: its mapping, and an alias on an index that is made where absent and compared where present."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from elasticsearch import BadRequestError, Elasticsearch, NotFoundError

from pipeline.retry import (
    Judgement,
    TemporaryRefusal,
    call_within,
    errors_judged,
    shortened,
)
from schemas.errors import SinkError
from schemas.settings import ElasticsearchSettings

INDEX_GENERATION = "v1"  # of the mapping: an index that holds another layout has another name
MAX_KEYWORD_CHARACTERS = 1024  # a longer one is stored, not indexed; Lucene refuses a term of 32,766 bytes

_KEYWORD: dict[str, Any] = {"type": "keyword", "ignore_above": MAX_KEYWORD_CHARACTERS}
_TEXT: dict[str, Any] = {"type": "text"}
_DATE: dict[str, Any] = {"type": "date"}
_LONG: dict[str, Any] = {"type": "long"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_FLOAT: dict[str, Any] = {"type": "float"}
_BOOLEAN: dict[str, Any] = {"type": "boolean"}
# Any JSON, scalars and lists too: kept in the source, neither parsed nor indexed, so it can neither fail nor explode.
_FREE_FORM: dict[str, Any] = {"type": "object", "enabled": False}


def _strict(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"dynamic": "strict", "properties": properties}


RESULTS_MAPPING: Mapping[str, Any] = _strict(
    job=_KEYWORD,
    id=_KEYWORD,
    task=_KEYWORD,
    kind=_KEYWORD,
    model=_KEYWORD,
    status=_KEYWORD,
    failure=_strict(code=_KEYWORD, stage=_KEYWORD, message=_TEXT),
    text=_TEXT,
    parsed=_FREE_FORM,
    label=_KEYWORD,
    label_scores=_FREE_FORM,
    finish_reason=_KEYWORD,
    stop_reason=_KEYWORD,
    logprobs=_FREE_FORM,
    truncated=_BOOLEAN,
    usage=_strict(prompt_tokens=_INTEGER, cached_tokens=_INTEGER, completion_tokens=_INTEGER),
    timing=_strict(wait_ms=_FLOAT, queue_ms=_FLOAT, prefill_ms=_FLOAT, decode_ms=_FLOAT, total_ms=_FLOAT),
    answered_at=_DATE,
    source=_strict(
        topic=_KEYWORD,
        partition=_INTEGER,
        offset=_LONG,
        timestamp={"type": "date", "format": "epoch_millis"},
        key=_KEYWORD,
    ),
    worker=_KEYWORD,
    attempts=_INTEGER,
    metadata=_FREE_FORM,
    receipt=_strict(
        weights=_KEYWORD,
        tokenizer=_KEYWORD,
        template=_KEYWORD,
        sampling=_FREE_FORM,
        seed=_LONG,
        engine_version=_KEYWORD,
        prompt_token_ids={"type": "binary"},
    ),
)


def index_name(alias: str) -> str:
    """The index that we make for an alias."""
    return f"{alias}-{INDEX_GENERATION}"


def ensure_index(
    client: Elasticsearch,
    alias: str,
    settings: ElasticsearchSettings,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Makes `alias` and its index where they are absent. Two workers may do it at once, and it may be done again.

    What Elasticsearch refuses for now is tried again for connect_timeout_seconds. Raises SinkError where that was not
    enough, where the alias's name is taken by an index, where its index's mapping disagrees with ours, or where we
    may not create or read it.
    """
    timeout = settings.connect_timeout_seconds
    try:
        call_within(timeout, lambda: _ensure(client, alias, settings), stop=stop, clock=clock)
    except TemporaryRefusal as error:
        raise SinkError(
            f"Elasticsearch neither makes nor shows the index of {alias!r} within {timeout:g} s ({error}): "
            f"see to it, or give it longer with elasticsearch.connect_timeout_seconds"
        ) from None


def _ensure(client: Elasticsearch, alias: str, settings: ElasticsearchSettings) -> None:
    with errors_judged(lambda judgement: _why_not(judgement, alias)):
        index = _index_behind(client, alias)
        if index is None:
            _create(client, alias, settings)
            index = _index_behind(client, alias)
        if index is None:  # the index was there before us, without its alias
            index = index_name(alias)
            _check_mapping(client, alias, index)
            client.indices.put_alias(index=index, name=alias, is_write_index=True)
        else:
            _check_mapping(client, alias, index)


def check_index(client: Elasticsearch, alias: str) -> None:
    """Raises SinkError where the index behind `alias` is gone or disagrees with our rows; changes nothing.

    Raises TemporaryRefusal where that cannot be told now.
    """
    with errors_judged(lambda judgement: _why_not(judgement, alias)):
        index = _index_behind(client, alias)
        if index is None:
            raise SinkError(f"the alias {alias!r} is gone: somebody deleted it or its index; restart to make it again")
        _check_mapping(client, alias, index)


def _index_behind(client: Elasticsearch, alias: str) -> str | None:
    """The index that a write through the alias goes to."""
    try:
        targets: dict[str, Any] = client.indices.get_alias(name=alias).body
    except NotFoundError:
        # Asked for the alias last: another worker may have made it since.
        if client.indices.exists(index=alias) and not client.indices.exists_alias(name=alias):
            raise SinkError(
                f"{alias!r} is an index, and should be an alias on {index_name(alias)!r}: "
                f"delete or reindex it, or give another name as elasticsearch.index"
            ) from None
        return None
    if len(targets) == 1:
        return next(iter(targets))
    writable = [name for name, entry in targets.items() if entry["aliases"][alias].get("is_write_index")]
    names = ", ".join(sorted(targets))
    raise SinkError(
        f"the alias {alias!r} points at {len(targets)} indices ({names}; writes go to {writable or 'none'}), "
        f"but an _id is unique within one index only: let it point at one of them"
    )


def _create(client: Elasticsearch, alias: str, settings: ElasticsearchSettings) -> None:
    try:
        client.indices.create(
            index=index_name(alias),
            mappings=RESULTS_MAPPING,
            aliases={alias: {"is_write_index": True}},
            settings={
                "number_of_shards": settings.number_of_shards,
                "number_of_replicas": settings.number_of_replicas,
            },
        )
    except BadRequestError as error:
        if error.message != "resource_already_exists_exception":  # another worker was faster: as good
            raise


def _check_mapping(client: Elasticsearch, alias: str, index: str) -> None:
    found: dict[str, Any] = client.indices.get_mapping(index=index).body[index]["mappings"]
    for difference in mapping_differences(RESULTS_MAPPING, found):
        raise SinkError(
            f"the index {index!r} behind {alias!r} disagrees with the mapping of results: {difference}. "
            f"Give another name as elasticsearch.index, or reindex it into one made by this version"
        )


def mapping_differences(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A sentence for each of our fields that `found` lacks or maps otherwise. Fields of its own are none of ours."""
    for parameter, value in wanted.items():
        if parameter == "properties":
            continue
        if _as_text(found.get(parameter)) != _as_text(value):
            where = f"the field {path!r}" if path else "the index as a whole"
            yield f"{where} has {parameter} {found.get(parameter)!r} instead of {value!r}"
            return
    for field, mapping in wanted.get("properties", {}).items():
        field_path = f"{path}.{field}" if path else field
        field_found = found.get("properties", {}).get(field)
        if field_found is None:
            yield f"the field {field_path!r} is missing"
        else:
            yield from mapping_differences(mapping, field_found, field_path)


def _as_text(value: Any) -> str:
    """Servers answer true as "true" in places."""
    return str(value).lower()


def _why_not(judgement: Judgement, alias: str) -> str:
    said = shortened(str(judgement))
    if judgement.status in (401, 403):
        return (
            f"Elasticsearch refuses to let us make or read {alias!r} ({said}): the credentials need create_index, "
            f"view_index_metadata, manage, read and write on {alias!r} and {index_name(alias)!r}"
        )
    return f"Elasticsearch refused to make or show the index of {alias!r}: {said}"
