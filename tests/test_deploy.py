"""What can be known of the images without a Docker engine."""

import re
from pathlib import Path

import pytest

from pipeline.account import Totals
from pipeline.metrics import Readings, WorkerMetrics
from pipeline.sink_stats import SinkStats
from schemas.inference import EngineStats
from schemas.settings import require_addresses
from schemas.settings_reader import load_settings

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"


def test_the_compose_file_has_three_services_and_the_servers_are_healthy_before_the_worker_starts() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"kafka", "elasticsearch", "worker"}
    assert all(services[name]["healthcheck"]["test"] for name in ("kafka", "elasticsearch"))
    assert services["worker"]["depends_on"] == {
        "kafka": {"condition": "service_healthy"},
        "elasticsearch": {"condition": "service_healthy"},
    }


def test_the_compose_workers_settings_are_accepted_and_name_the_composes_servers() -> None:
    settings = load_settings(DEPLOY / "pagemill.toml", {}, {})
    require_addresses(settings)
    assert settings.kafka.bootstrap_servers == ("kafka:9092",)
    assert settings.elasticsearch.urls == ("http://elasticsearch:9200",)
    grace = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["worker"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > settings.worker.grace_seconds


def test_what_the_dockerfile_copies_is_there_and_reaches_the_build() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    let_through = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert names == let_through
    assert all((ROOT / name).exists() for name in names)


def test_the_servers_are_the_versions_that_the_tests_run() -> None:
    images = {name: service.get("image") for name, service in _services().items()}
    kafka, elasticsearch = (
        re.search(rf"<{name}.version>(.+?)<", (ROOT / "tests" / "servers" / name / "pom.xml").read_text())
        for name in ("kafka", "elasticsearch")
    )
    assert kafka is not None
    assert elasticsearch is not None
    assert images["kafka"] == f"apache/kafka:{kafka[1]}"
    assert images["elasticsearch"] == f"elasticsearch:{elasticsearch[1]}"


def test_alerts_are_over_metrics_that_a_worker_exports_and_an_imbalance_is_one() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    expressions = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    with_values = Readings({"engine": None}, Totals(), {"engine": 0}, 0, EngineStats(), SinkStats(), 0, False, {})
    exported = set(re.findall(r"^(pagemill_\w+)", WorkerMetrics(lambda: with_values).text().decode(), re.MULTILINE))
    for expression in expressions.values():
        names = set(re.findall(r"pagemill_\w+", expression))
        assert names
        assert names <= exported
    assert expressions["PagemillAccountDoesNotBalance"] == 'pagemill_account_imbalance{count="source"} != 0'


def _services() -> dict[str, dict[str, str]]:
    services: dict[str, dict[str, str]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return services
