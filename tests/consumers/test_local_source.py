"""The source from memory and files: the same face, the same rules."""

from pathlib import Path

import pytest

from consumers.kafka import KafkaSource
from consumers.source import LocalSource, Source
from schemas.document import Document, RejectedDocument
from schemas.errors import Failure, FailureCode, SourceError, Stage
from schemas.settings import KafkaSettings

GOOD = b'{"prompt": "a"}'


def test_both_sources_have_the_same_face() -> None:
    sources: list[Source] = [LocalSource([]), KafkaSource(KafkaSettings(bootstrap_servers=("127.0.0.1:1",)))]
    assert [source.num_in_flight for source in sources] == [0, 0]
    assert not any(source.has_assignment or source.is_drained() for source in sources)


def test_documents_come_in_order_and_commit_in_order() -> None:
    source = LocalSource([GOOD, b"{", None])
    source.start()
    first = source.poll(2, 0.0)
    assert [type(document) for document in first] == [Document, RejectedDocument]
    assert [str(document.position) for document in first] == ["local/0/0", "local/0/1"]
    (last,) = source.poll(2, 0.0)
    assert not source.is_drained()
    source.complete([first[1].position, last.position])
    assert source.committed == 0
    source.complete([first[0].position])
    assert (source.committed, source.is_drained()) == (3, True)


def test_no_more_is_read_than_may_be_in_flight() -> None:
    source = LocalSource([GOOD] * 5, max_in_flight_documents=2)
    source.start()
    documents = source.poll(5, 0.0)
    assert len(documents) == 2
    assert source.poll(5, 0.0) == []
    source.complete([documents[0].position])
    assert len(source.poll(5, 0.0)) == 1


def test_a_dead_letter_keeps_the_raw_message_and_is_acknowledged() -> None:
    source = LocalSource([b"{"])
    source.start()
    (rejected,) = source.poll(1, 0.0)
    assert isinstance(rejected, RejectedDocument)
    failure, acknowledged = Failure(FailureCode.BAD_MESSAGE, Stage.DECODE, "why"), []
    source.dead_letter(rejected.position, "job", failure, lambda: acknowledged.append(True))
    assert acknowledged == [True]
    assert [(letter.raw.value, letter.job, letter.failure) for letter in source.dead_letters] == [
        (b"{", "job", failure)
    ]
    source.complete([rejected.position])
    source.dead_letter(rejected.position, "job", failure, lambda: acknowledged.append(True))
    assert acknowledged == [True]


def test_a_draining_source_hands_out_nothing_more() -> None:
    source = LocalSource([GOOD, GOOD])
    source.start()
    source.poll(1, 0.0)
    source.drain()
    assert source.poll(1, 0.0) == []
    assert not source.is_drained()


def test_a_file_has_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n  {"prompt": "b"}\r\n{"prompt": "c"}')
    source = LocalSource.from_jsonl(path)
    source.start()
    documents = source.poll(10, 0.0)
    assert [d.message.prompt for d in documents if isinstance(d, Document)] == ["a", "b", "c"]
    assert documents[2].identity.document_id == "documents.jsonl/0/2"
    with pytest.raises(SourceError, match=r"nowhere\.jsonl: no such file"):
        LocalSource.from_jsonl(tmp_path / "nowhere.jsonl")
