"""The soak itself, for seconds: its books close. What it says of memory and latency is for an hour."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.kafka_broker import KafkaBroker
from tests.soak.driver import soak
from tests.soak.feeder import fails, make_document
from tests.soak.measure import read_process
from tests.soak.rules import judge_books

NUM_IDS = 2000


def test_ids_and_kinds_come_again_and_prompts_do_not() -> None:
    first, again = (json.loads(make_document(number, NUM_IDS)) for number in (8, 8 + NUM_IDS))
    assert (first["id"], first["job"], first["priority"]) == (again["id"], again["job"], again["priority"])
    assert first["prompt"] == "document 8"
    assert again["prompt"] == "document 2008"


def test_one_document_in_five_hundred_has_a_task_that_nobody_knows() -> None:
    assert [number for number in range(3000) if fails(number, NUM_IDS)] == [499, 999, 1499, 1999, 2499, 2999]
    assert json.loads(make_document(2499, NUM_IDS))["task"] == "translate"


def test_an_open_file_is_one_more_descriptor_of_this_process(tmp_path: Path) -> None:
    before = read_process(os.getpid())
    with (tmp_path / "file").open("w"):
        assert read_process(os.getpid()).num_descriptors == before.num_descriptors + 1
    assert 0 < before.anonymous <= before.rss
    assert 0 < before.pss <= before.rss


@pytest.mark.real_servers
def test_a_soak_of_seconds_takes_samples_and_closes_its_books(
    tmp_path: Path, kafka_broker: KafkaBroker, elasticsearch_node: ElasticsearchNode, fresh_name: Callable[[str], str]
) -> None:
    """Ids come again, and records are deleted behind the commits, also in so short a time."""
    said: list[str] = []
    samples, books = soak(
        tmp_path,
        kafka_broker.bootstrap_servers,
        elasticsearch_node.url,
        6.0,
        num_ids=NUM_IDS,
        backlog=3000,
        sample_seconds=0.5,
        name=fresh_name("soak"),
        tell=said.append,
    )
    assert [str(finding) for finding in judge_books(books) if not finding.holds] == []
    assert books.num_ids == NUM_IDS < books.num_produced
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(samples) - 1
    assert len(said) > 2
