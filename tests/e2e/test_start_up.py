"""A worker that cannot work says so at its start, in one sentence, before it consumes anything."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.demo import free_port
from pipeline.embedded import EmbeddedServer
from tests.e2e.conftest import StartWorker
from tests.e2e.documents import make_documents
from tests.e2e.servers import Servers
from tests.e2e.workers import WorkerProcess
from tests.servers.elasticsearch_node import ElasticsearchNode
from tests.servers.fixtures import SASL_USER
from tests.servers.kafka_broker import KafkaBroker


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """The embedded server with documents that nobody must touch."""
    with EmbeddedServer() as server:
        servers = Servers(server.kafka_address, server.elasticsearch_url, "untouched", server.kafka_settings())
        servers.create_topic(2)
        servers.produce(make_documents(2, num_good=5))
        yield servers


def assert_refused(worker: WorkerProcess, servers: Servers, *said: str) -> None:
    code = worker.wait()
    assert code in (1, 2), worker.log
    last = worker.log[worker.log.rfind("\npagemill: ") + 1 :]
    assert last.startswith("pagemill: "), worker.log
    for words in said:
        assert words in last
    assert "Traceback" not in worker.log
    assert servers.committed() == {}
    assert servers.count_rows() == 0


def copy_of(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model"))


def test_a_model_folder_that_misses_a_shard(
    servers: Servers, tmp_path: Path, start_worker: StartWorker, sharded_model: Path
) -> None:
    model = copy_of(sharded_model, tmp_path)
    shard = sorted(model.glob("model-*.safetensors"))[-1]
    shard.unlink()
    assert_refused(start_worker("worker", servers.settings(str(model))), servers, shard.name)


@pytest.mark.parametrize("kept", [0.5, 0.98], ids=["in the middle", "near the end"])
def test_a_gguf_file_that_is_cut_short(
    servers: Servers, tmp_path: Path, start_worker: StartWorker, tiny_gguf: Path, kept: float
) -> None:
    content = tiny_gguf.read_bytes()
    model = tmp_path / "cut.gguf"
    model.write_bytes(content[: int(len(content) * kept)])
    assert_refused(start_worker("worker", servers.settings(str(model))), servers, "cut.gguf")


def test_a_file_that_is_no_model(servers: Servers, tmp_path: Path, start_worker: StartWorker) -> None:
    model = tmp_path / "letter.txt"
    model.write_text("Dear model,")
    assert_refused(start_worker("worker", servers.settings(str(model))), servers, "letter.txt", "GGUF")


def test_a_path_where_nothing_is(servers: Servers, start_worker: StartWorker) -> None:
    assert_refused(start_worker("worker", servers.settings("/no/such/model")), servers, "/no/such/model")


def test_an_architecture_that_is_not_supported(
    servers: Servers, tmp_path: Path, start_worker: StartWorker, tiny_model: Path
) -> None:
    model = copy_of(tiny_model, tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    assert_refused(start_worker("worker", servers.settings(str(model))), servers, "mamba", "qwen2")


def test_a_tokenizer_that_disagrees_with_the_vocabulary(
    servers: Servers, tmp_path: Path, start_worker: StartWorker, tiny_model: Path
) -> None:
    model = copy_of(tiny_model, tmp_path)
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    added = {
        "id": vocab_size + 9, "content": "<|beyond|>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    vocab = tokenizer["model"]["vocab"]
    for token_id in range(max(vocab.values()) + 1, vocab_size + 9):
        vocab[f"filler-{token_id}"] = token_id
    file.write_text(json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added]}))
    assert_refused(start_worker("worker", servers.settings(str(model))), servers, "vocabulary", str(vocab_size))


def test_settings_that_name_nothing(servers: Servers, start_worker: StartWorker) -> None:
    worker = start_worker("worker", {"worker": {"log_format": "console"}})
    assert_refused(worker, servers, "kafka.bootstrap_servers", "elasticsearch.urls", "model.path")


@pytest.mark.parametrize(
    ("part", "key", "named"),
    [("kafka", "bootstrap_servers", "Kafka"), ("elasticsearch", "urls", "Elasticsearch")],
)
def test_an_address_that_nobody_listens_on(
    servers: Servers, start_worker: StartWorker, tiny_model: Path, part: str, key: str, named: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    nobody: Mapping[str, Any] = {
        key: [address if part == "kafka" else f"http://{address}"],
        "connect_timeout_seconds": 2.0,
    }
    worker = start_worker("worker", servers.settings(str(tiny_model), **{part: nobody}))
    assert_refused(worker, servers, named, address)


def test_an_input_topic_that_is_not_there(servers: Servers, start_worker: StartWorker, tiny_model: Path) -> None:
    settings = servers.settings(str(tiny_model), kafka={"topics": ["pagemill.documnets"]})
    assert_refused(start_worker("worker", settings), servers, "pagemill.documnets")


def test_a_task_whose_template_is_broken(servers: Servers, start_worker: StartWorker, tiny_model: Path) -> None:
    settings = servers.settings(str(tiny_model))
    settings = {**settings, "tasks": {"broken": {"template": "{{ text"}}}
    assert_refused(start_worker("worker", settings), servers, "tasks.broken.template")


@pytest.mark.real_servers
def test_a_wrong_kafka_password(
    kafka_broker: KafkaBroker,
    elasticsearch_node: ElasticsearchNode,
    fresh_name: Callable[[str], str],
    start_worker: StartWorker,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "password").write_text("not the password\n")
    servers = Servers(kafka_broker.bootstrap_servers, elasticsearch_node.url, fresh_name("password"), {})
    servers.create_topic(1)
    wrong = {
        "bootstrap_servers": [kafka_broker.sasl_bootstrap_servers],
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_username": SASL_USER,
        "sasl_password_file": str(tmp_path / "password"),
    }
    worker = start_worker("worker", servers.settings(str(tiny_model), kafka=wrong))
    assert_refused(worker, servers, "uthentication", SASL_USER)
    assert "not the password" not in worker.log
