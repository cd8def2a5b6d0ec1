import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any

import orjson
import pytest
from elasticsearch import BadRequestError, Elasticsearch

from pipeline.index import RESULTS_MAPPING, ensure_index, mapping_differences
from pipeline.results import packed_prompt
from schemas.document import DocumentResult, Receipt, ResultSource, Timing, Usage
from schemas.errors import Failure, FailureCode, SinkError, Stage
from schemas.inference import SamplingParams
from schemas.settings import ElasticsearchSettings
from tests.pipeline.rows import row
from tests.servers.elasticsearch_node import ElasticsearchNode

SETTINGS = ElasticsearchSettings(number_of_replicas=0)
PARTS: dict[str, type] = {
    "failure": Failure, "usage": Usage, "timing": Timing, "source": ResultSource, "receipt": Receipt,
}  # fmt: skip


@pytest.fixture
def client(elasticsearch_node: ElasticsearchNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(elasticsearch_node.url) as client:
        yield client


def test_the_mapping_has_a_place_for_every_part_of_a_row_and_no_other() -> None:
    assert set(RESULTS_MAPPING["properties"]) == {part.name for part in fields(DocumentResult)}
    for name, kind in PARTS.items():
        assert set(RESULTS_MAPPING["properties"][name]["properties"]) == {part.name for part in fields(kind)}, name


def test_a_mapping_agrees_with_itself_and_fields_beside_ours_are_not_our_business() -> None:
    found = {**RESULTS_MAPPING, "properties": {**RESULTS_MAPPING["properties"], "team": {"type": "keyword"}}}
    assert list(mapping_differences(RESULTS_MAPPING, found)) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dynamic": "true"}, "the index as a whole has dynamic 'true' instead of 'strict'"),
        ({"label": {"type": "text"}}, "the field 'label' has type 'text' instead of 'keyword'"),
        ({"metadata": {"type": "object"}}, "the field 'metadata' has enabled None instead of False"),
        ({"metadata": {"type": "flattened"}}, "the field 'metadata' has type 'flattened' instead of 'object'"),
        ({"usage": {"dynamic": "strict", "properties": {}}}, "the field 'usage.prompt_tokens' is missing"),
    ],
)
def test_a_difference_names_its_field(change: dict[str, Any], sentence: str) -> None:
    properties = {**RESULTS_MAPPING["properties"], **{k: v for k, v in change.items() if k != "dynamic"}}
    found = {"dynamic": change.get("dynamic", "strict"), "properties": properties}
    assert next(mapping_differences(RESULTS_MAPPING, found)) == sentence


@pytest.mark.real_servers
def test_an_alias_that_another_worker_makes_between_two_looks_is_no_index(
    client: Elasticsearch, fresh_name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alias, get_alias = fresh_name("results"), client.indices.get_alias

    def overtaken(**arguments: Any) -> Any:
        monkeypatch.undo()
        try:
            return get_alias(**arguments)
        finally:
            ensure_index(client, alias, SETTINGS)

    monkeypatch.setattr(client.indices, "get_alias", overtaken)
    ensure_index(client, alias, SETTINGS)
    assert list(client.indices.get_alias(name=alias).body) == [f"{alias}-v1"]


@pytest.mark.real_servers
def test_alias_and_index_are_made_once_and_two_workers_may_do_it_at_once(
    client: Elasticsearch, fresh_name: Callable[[str], str]
) -> None:
    alias = fresh_name("results")
    errors: list[BaseException] = []

    def make() -> None:
        try:
            ensure_index(client, alias, SETTINGS)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=make) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    assert client.indices.get_alias(name=alias).body == {f"{alias}-v1": {"aliases": {alias: {"is_write_index": True}}}}
    ensure_index(client, alias, SETTINGS)


@pytest.mark.real_servers
def test_an_index_without_its_alias_gets_it(client: Elasticsearch, fresh_name: Callable[[str], str]) -> None:
    alias = fresh_name("results")
    ensure_index(client, alias, SETTINGS)
    client.indices.delete_alias(index=f"{alias}-v1", name=alias)
    ensure_index(client, alias, SETTINGS)
    assert client.indices.exists_alias(name=alias)


@pytest.mark.real_servers
def test_an_index_that_disagrees_is_refused_with_the_field_named(
    client: Elasticsearch, fresh_name: Callable[[str], str]
) -> None:
    alias = fresh_name("results")
    properties = {**RESULTS_MAPPING["properties"], "label": {"type": "text"}}
    client.indices.create(
        index=f"{alias}-old", mappings={"dynamic": "strict", "properties": properties}, aliases={alias: {}}
    )
    with pytest.raises(SinkError, match=f"'{alias}-old' .* the field 'label' has type 'text' instead of 'keyword'"):
        ensure_index(client, alias, SETTINGS)


@pytest.mark.real_servers
def test_an_index_in_the_aliass_place_and_an_alias_on_two_indices_are_refused(
    client: Elasticsearch, fresh_name: Callable[[str], str]
) -> None:
    taken, split = fresh_name("results"), fresh_name("results")
    client.indices.create(index=taken)
    with pytest.raises(SinkError, match=f"'{taken}' is an index, and should be an alias"):
        ensure_index(client, taken, SETTINGS)
    for number in (1, 2):
        client.indices.create(index=f"{split}-{number}", aliases={split: {}})
    with pytest.raises(SinkError, match=f"'{split}' points at 2 indices"):
        ensure_index(client, split, SETTINGS)


@pytest.mark.real_servers
def test_the_mapping_takes_every_kind_of_row_and_refuses_a_field_it_does_not_know(
    client: Elasticsearch, fresh_name: Callable[[str], str]
) -> None:
    alias = fresh_name("results")
    ensure_index(client, alias, SETTINGS)
    receipt = Receipt("w", "t", "p", asdict(SamplingParams()), 2**63 - 1, "1", packed_prompt([1, 2, 3]))
    logprobs = [{"token_id": 1, "logprob": -0.5, "top": [{"token_id": 1, "logprob": -0.5}]}]
    deep: Any = 1
    for _ in range(100):
        deep = {"a": [deep]}
    free_forms: list[Any] = [
        None, 1, -1.5, "x" * 40_000, True, [], [1, "a", None, {"b": []}], {}, {"a": 1}, {"a": {"b": "c"}}, {"a": "t"},
        {"": 1, "a.b": 2, ".": 3, "\x00": 4}, deep, 2**60, ["x", [["y"]]],
    ]  # fmt: skip
    rows = [row(n, parsed=value, metadata={"m": value}, logprobs=logprobs) for n, value in enumerate(free_forms)]
    rows += [
        row(100, receipt=receipt, finish_reason="length", stop_reason="\n\n", truncated=True, label="good",
            label_scores={"good": 0.9, "a.b, c.": 0.1}, usage=Usage(1, 2, 3), timing=Timing(0.1, 0.2, 0.3, 0.4, 9e9)),
        row(101, status="failed", text=None, failure=Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "x" * 50_000)),
        row(102, text="a\x00b " + "x" * 100_000, label="y" * 50_000, task="z" * 9000),
    ]  # fmt: skip
    for number, each in enumerate(rows):
        client.index(index=alias, id=str(number), document=orjson.loads(orjson.dumps(each)), require_alias=True)
    client.indices.refresh(index=alias)
    assert client.count(index=alias)["count"] == len(rows)
    assert client.get(index=alias, id="6")["_source"]["parsed"] == [1, "a", None, {"b": []}]
    for unknown in ({"surprise": 1}, {"usage": {"surprise": 1}}, {"receipt": {"surprise": 1}}):
        with pytest.raises(BadRequestError, match="strict_dynamic_mapping_exception"):
            client.index(index=alias, document=unknown, require_alias=True)
