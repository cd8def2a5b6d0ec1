import dataclasses
from typing import Any

import orjson
import pytest
from elastic_transport import ConnectionError as NodeConnectionError
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bulk import BulkWriter, OutboundRow, RowUnencodable, encode_row
from pipeline.index import RESULTS_MAPPING, check_index
from pipeline.results import row_id
from pipeline.retry import NodeBusy, NodeUnreachable
from schemas.document import DocumentResult, Identity
from schemas.errors import SinkError
from tests.fake_elasticsearch import FakeElasticsearch, api_error
from tests.pipeline.rows import position, row


def outbound(offset: int, *, version: int | None = None, partition: int = 0, **parts: Any) -> OutboundRow:
    result = row(offset, partition=partition, **parts)
    identity, version = row_id(Identity(result.job, result.task, result.id)), offset if version is None else version
    body = encode_row(result, "results", identity, version)
    return OutboundRow(result, position(offset, partition), "results", identity, version, body, 0.0)


def writer(server: FakeElasticsearch) -> BulkWriter:
    return BulkWriter(server.as_client(), 60.0, lambda alias: check_index(server.as_client(), alias))


def offsets(rows: list[OutboundRow]) -> list[int]:
    return [each.position.offset for each in rows]


def source_of(result: DocumentResult) -> dict[str, Any]:
    action, source = encode_row(result, "results", "id", 1).splitlines()
    assert orjson.loads(action) == {
        "index": {"_index": "results", "_id": "id", "version": 1, "version_type": "external"}
    }
    found: dict[str, Any] = orjson.loads(source)
    return found


def test_each_row_of_one_call_has_its_own_verdict() -> None:
    server = FakeElasticsearch()
    told = {"job:task:document-2": (429, "es_rejected_execution_exception"), "job:task:document-3": (400, "document_parsing_exception")}  # fmt: skip # noqa: E501
    server.on_bulk.append(lambda action: told.get(action["_id"]))
    outcome = writer(server).write([outbound(offset) for offset in (1, 2, 3, 4)])
    assert offsets(outcome.stored) == [1, 4]
    assert offsets(outcome.refused) == [2]
    assert [(each.position.offset, why.message) for each, why in outcome.rejected] == [
        (3, "Elasticsearch rejects the row: 400: document_parsing_exception: on cue")
    ]
    assert isinstance(outcome.refusal(), NodeBusy)
    assert outcome.refusal().progressed


def test_a_conflict_with_our_own_record_is_done_and_with_another_is_superseded() -> None:
    server = FakeElasticsearch()
    writer(server).write([outbound(1), outbound(9, document_id="document-2")])
    again = writer(server).write([outbound(1), outbound(2)])
    assert (offsets(again.already_done), offsets(again.superseded), again.stored) == ([1], [2], [])
    assert server.stored["job:task:document-2"][0] == 9


def test_two_rows_of_one_document_in_one_call_leave_the_higher_version_whatever_their_order() -> None:
    for order in ([1, 2], [2, 1]):
        server = FakeElasticsearch()
        outcome = writer(server).write([outbound(offset, document_id="same") for offset in order])
        assert server.stored["job:task:same"][0] == 2
        assert outcome.num_settled == 2
        assert offsets(outcome.superseded) == ([] if order == [1, 2] else [1])


def test_the_same_offset_of_another_partition_is_another_record() -> None:
    server = FakeElasticsearch()
    writer(server).write([outbound(5, document_id="same", partition=1)])
    outcome = writer(server).write([outbound(5, document_id="same", partition=0)])
    assert offsets(outcome.superseded) == [5]


def test_a_look_up_that_fails_leaves_the_conflict_to_the_next_attempt() -> None:
    server = FakeElasticsearch()
    writer(server).write([outbound(1)])
    server.on_mget.append(NodeConnectionError("reset"))
    outcome = writer(server).write([outbound(1)])
    assert offsets(outcome.refused) == [1]
    assert isinstance(outcome.refusal(), NodeUnreachable)
    assert offsets(writer(server).write(outcome.refused).already_done) == [1]


def test_a_call_that_is_refused_as_a_whole_refuses_each_row() -> None:
    server = FakeElasticsearch()
    server.on_bulk.append(api_error(429, "es_rejected_execution_exception", retry_after="4"))
    outcome = writer(server).write([outbound(1), outbound(2)])
    assert offsets(outcome.refused) == [1, 2]
    assert outcome.refusal().retry_after_seconds == 4.0
    assert not outcome.refusal().progressed


def test_one_poisonous_row_is_found_by_halves_and_rejected_alone() -> None:
    server = FakeElasticsearch()
    server.poison_ids.add("job:task:document-5")
    outcome = writer(server).write([outbound(offset) for offset in range(8)])
    assert offsets(outcome.stored) == [0, 1, 2, 3, 4, 6, 7]
    assert [each.position.offset for each, _ in outcome.rejected] == [5]
    assert server.bulk_sizes == [8, 4, 4, 2, 1, 1, 2]


def test_a_call_that_is_too_large_goes_in_halves_and_says_which_size_was_the_smallest_refused() -> None:
    server = FakeElasticsearch()
    rows = [outbound(offset) for offset in range(8)]
    server.max_body_bytes = sum(len(each.body) for each in rows[:2])
    outcome = writer(server).write(rows)
    assert offsets(outcome.stored) == list(range(8))
    assert server.bulk_sizes == [8, 4, 2, 2, 4, 2, 2]
    assert outcome.too_large_bytes == sum(len(each.body) for each in rows[:4])


def test_a_single_row_that_is_too_large_is_rejected_with_its_size() -> None:
    server = FakeElasticsearch()
    server.max_body_bytes = 5000
    outcome = writer(server).write([outbound(1), outbound(2, text="x" * 9000)])
    assert offsets(outcome.stored) == [1]
    [(rejected, why)] = outcome.rejected
    assert f"the row of {len(rejected.body)} bytes is larger than Elasticsearch accepts" in why.message


def test_a_refusal_in_the_middle_of_halving_keeps_the_rest_for_later() -> None:
    server = FakeElasticsearch()
    server.on_bulk.extend([api_error(413), api_error(503)])
    outcome = writer(server).write([outbound(offset) for offset in range(4)])
    assert offsets(outcome.refused) == [0, 1, 2, 3]
    assert server.bulk_sizes == [4, 2]


@pytest.mark.parametrize(
    ("cue", "sentence"),
    [
        (api_error(401, "security_exception"), "check the credentials"),
        (api_error(403, "security_exception"), "check the credentials"),
        (api_error(404, "index_not_found_exception"), "the alias 'results' is gone"),
        (lambda action: (400, "strict_dynamic_mapping_exception"), "lacks a field of our rows"),
        (lambda action: (404, "index_not_found_exception"), "the alias 'results' is gone"),
        (lambda action: (400, "index_closed_exception"), "is closed"),
    ],
)
def test_a_wrong_deployment_stops_with_a_sentence_and_rejects_no_row(cue: Any, sentence: str) -> None:
    server = FakeElasticsearch()
    server.on_bulk.append(cue)
    with pytest.raises(SinkError, match=sentence):
        writer(server).write([outbound(1), outbound(2)])


def test_a_row_that_does_not_fit_an_index_with_our_mapping_is_rejected() -> None:
    server = FakeElasticsearch()
    server.on_bulk.append(lambda action: (400, "document_parsing_exception") if action["version"] == 1 else None)
    outcome = writer(server).write([outbound(1), outbound(2)])
    assert ([each.position.offset for each, _ in outcome.rejected], offsets(outcome.stored)) == ([1], [2])


def test_rows_that_do_not_fit_since_the_index_was_replaced_stop_and_none_is_rejected() -> None:
    server = FakeElasticsearch()
    properties = {**RESULTS_MAPPING["properties"], "text": {"type": "long"}}
    server.indices.mapping = {"dynamic": "strict", "properties": properties}
    server.on_bulk.append(lambda action: (400, "document_parsing_exception"))
    with pytest.raises(SinkError, match="the field 'text' has type 'long' instead of 'text'"):
        writer(server).write([outbound(1), outbound(2)])


def test_rows_that_do_not_fit_are_kept_while_the_index_cannot_be_looked_at() -> None:
    server = FakeElasticsearch()
    server.indices.on_get_mapping.append(api_error(503))
    server.on_bulk.append(lambda action: (400, "document_parsing_exception"))
    outcome = writer(server).write([outbound(1), outbound(2)])
    assert (offsets(outcome.refused), outcome.rejected) == ([1, 2], [])


def test_surrogates_numbers_past_64_bits_and_deep_metadata_are_written_down() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    metadata = {"surrogate": "a\ud800", "\udfff": 1, "huge": 2**70, "nan": float("nan"), "deep": deep}
    source = source_of(row(1, metadata=metadata))
    assert source["metadata"]["surrogate"] == "a\\ud800"
    assert source["metadata"]["\\udfff"] == 1
    assert source["metadata"]["huge"] == float(2**70)
    assert source["metadata"]["nan"] is None
    assert source["answered_at"] == "2026-01-02T03:04:05+00:00"
    assert source["usage"] == {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}


@pytest.mark.parametrize("version", [-1, 2**63])
def test_a_version_that_would_fail_the_whole_bulk_is_refused_for_its_row(version: int) -> None:
    with pytest.raises(RowUnencodable, match="outside 0 to"):
        encode_row(row(1), "results", "id", version)


def test_metadata_without_an_end_is_refused_for_its_row() -> None:
    metadata: dict[str, Any] = {}
    metadata["self"] = metadata
    with pytest.raises(RowUnencodable):
        encode_row(row(1, metadata=metadata), "results", "id", 1)


def test_a_record_whose_replay_has_the_row_is_superseded_and_the_replay_itself_is_done() -> None:
    server = FakeElasticsearch()
    replayed = outbound(1, version=17)  # attempt 1 of the record at offset 1
    writer(server).write([replayed])
    again = writer(server).write([outbound(1, version=16), dataclasses.replace(replayed, position=position(90))])
    assert (offsets(again.superseded), offsets(again.already_done)) == ([1], [90])


CALL_ENDS = st.sampled_from(
    [None, api_error(429), api_error(503), api_error(413), api_error(400), NodeConnectionError("reset")]
)
ROW_ENDS = st.sampled_from(
    [None, (429, "es_rejected_execution_exception"), (400, "document_parsing_exception"), (400, "mapper_exception"),
     (503, "unavailable_shards_exception"), (403, "cluster_block_exception")]
)  # fmt: skip


@given(
    st.lists(ROW_ENDS, min_size=1, max_size=12),
    st.lists(CALL_ENDS, max_size=8),
    st.integers(0, 3),
    st.sets(st.integers(0, 11)),
)
def test_every_row_has_exactly_one_verdict_whatever_the_calls_and_rows_come_to(
    row_ends: list[tuple[int, str] | None], call_ends: list[Exception | None], num_failed_looks: int, stored: set[int]
) -> None:
    server = FakeElasticsearch()
    for offset in stored:  # by an earlier attempt
        writer(server).write([outbound(offset)])
    rows = [outbound(offset) for offset in range(len(row_ends))]
    for end in call_ends:
        server.on_bulk.append(end if end is not None else lambda action: row_ends[action["version"]])
    server.on_mget.extend([api_error(503)] * num_failed_looks)
    outcome = writer(server).write(rows)
    lists = [outcome.stored, outcome.already_done, outcome.superseded, [each for each, _ in outcome.rejected], outcome.refused]  # fmt: skip # noqa: E501
    assert sorted(each.position.offset for rows_of_one in lists for each in rows_of_one) == list(range(len(rows)))
    assert (outcome.conflicts, outcome.misfits, outcome.superseded) == ([], [], [])
    assert bool(outcome.refused) == (outcome.cause is not None)
    assert {each.row_id for each in outcome.stored + outcome.already_done} <= set(server.stored)
    assert not {each.row_id for each, _ in outcome.rejected} & {each.row_id for each in outcome.stored}
