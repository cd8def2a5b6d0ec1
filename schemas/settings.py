"""Every setting: frozen, one class per owner, unknown keys refused with the nearest valid name.

Read once, in this order of strength: command-line flags, environment (`PAGEMILL_KAFKA__TOPICS`), one TOML file.
Secrets come from files or the environment and are never written in the TOML file.
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from schemas.inference import EngineSettings, ModelSettings
from schemas.task import Task

DEFAULT_SETTINGS_FILE = Path("pagemill.toml")
TASK_NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KafkaSettings(_Part):
    """The Kafka side: where documents come from and failed ones go."""

    bootstrap_servers: tuple[str, ...] = ()
    topics: tuple[str, ...] = ("pagemill.documents",)
    dead_letter_topic: str = "pagemill.dead-letters"
    group: str = "pagemill"
    assignor: Literal["cooperative-sticky", "range"] = "cooperative-sticky"
    client_id: str = "pagemill"
    group_instance_id: str | None = None  # static membership; needed on the embedded server
    session_timeout_seconds: float = Field(45.0, gt=0)
    max_poll_interval_seconds: float = Field(300.0, gt=0)
    connect_timeout_seconds: float = Field(15.0, gt=0)
    commit_interval_seconds: float = Field(1.0, gt=0)
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    sasl_password_file: Path | None = None
    ssl_ca_file: Path | None = None
    ssl_certificate_file: Path | None = None
    ssl_key_file: Path | None = None
    max_in_flight_documents: int = Field(4096, ge=1)  # polled and not yet acknowledged by Elasticsearch
    max_in_flight_bytes: int = Field(256 * 2**20, ge=1)
    max_document_bytes: int = Field(2**20, ge=1)
    replication_factor: int = Field(1, ge=1)  # of topics that we create


class ElasticsearchSettings(_Part):
    """The Elasticsearch side: where rows go."""

    urls: tuple[str, ...] = ()
    index: str = "pagemill-results"  # an alias, on `{index}-v1`, made at start
    username: str | None = None
    password: SecretStr | None = None
    password_file: Path | None = None
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    number_of_shards: int = Field(1, ge=1)  # of indices that we create
    number_of_replicas: int = Field(1, ge=0)
    bulk_documents: int = Field(1000, ge=1)
    bulk_bytes: int = Field(8 * 2**20, ge=1)
    flush_seconds: float = Field(1.0, gt=0)  # a row waits no longer than this for its bulk to fill
    num_writers: int = Field(2, ge=1)
    outbox_documents: int = Field(8192, ge=1)
    request_timeout_seconds: float = Field(60.0, gt=0)
    connect_timeout_seconds: float = Field(15.0, gt=0)
    max_backoff_seconds: float = Field(30.0, gt=0)
    breaker_failures: int = Field(5, ge=1)  # failed calls in a row that open the breaker


class WorkerSettings(_Part):
    """The worker itself: its window of documents, its HTTP face, its logs."""

    name: str | None = None  # in rows and dead letters; the host's name and process id where absent
    http_host: str = "127.0.0.1"
    http_port: int = Field(9464, ge=0, le=65535)  # 0: any free one
    grace_seconds: float = Field(30.0, ge=0)  # after SIGTERM, for what is in flight
    urgent_after_seconds: float = Field(300.0, gt=0)  # a document waiting longer, or this near its deadline, goes first
    engine_start_timeout_seconds: float = Field(600.0, gt=0)
    engine_restarts: int = Field(3, ge=0)  # in a row without one output between; then the worker stops
    receipts: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"


class Settings(BaseSettings):
    """All of it. `load_settings` is the one reader."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="PAGEMILL_",
        env_nested_delimiter="__",
    )

    kafka: KafkaSettings = KafkaSettings()
    elasticsearch: ElasticsearchSettings = ElasticsearchSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    worker: WorkerSettings = WorkerSettings()
    tasks: dict[str, Task] = Field(default_factory=dict)
