"""Every setting: frozen, one class per owner, unknown keys refused with the nearest valid name.

schemas/settings_reader.py reads them, once. Secrets come from files or the environment and are never in the TOML file.
"""

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from schemas.errors import SettingsError
from schemas.inference import EngineSettings, ModelSettings
from schemas.task import Task

TASK_NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

# Up to the last '@'. Of what looks like a scheme only these are known to be one, and no part of a password.
_CREDENTIALS = re.compile(r"^(https?://)?.*@", re.DOTALL)
_CREDENTIALS_BELONG = {
    "elasticsearch.urls": "elasticsearch.username and password_file, or as api_key_file",
    "kafka.bootstrap_servers": "kafka.sasl_username and sasl_password_file",
}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KafkaSettings(_Part):
    """The Kafka side: where documents come from and failed ones go."""

    bootstrap_servers: tuple[str, ...] = ()
    topics: tuple[str, ...] = Field(("pagemill.documents",), min_length=1)
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
    ssl_key_password: SecretStr | None = None
    ssl_key_password_file: Path | None = None
    max_in_flight_documents: int = Field(4096, ge=1)  # polled and not yet acknowledged by Elasticsearch
    max_in_flight_bytes: int = Field(256 * 2**20, ge=1)
    max_document_bytes: int = Field(2**20, ge=1)
    replication_factor: int = Field(1, ge=1)  # of topics that we create

    @model_validator(mode="after")
    def _dead_letters_are_not_read(self) -> Self:
        if self.dead_letter_topic in self.topics:
            raise ValueError(
                f"dead_letter_topic {self.dead_letter_topic!r} is one of the topics that are read: a failed message "
                "would come again and fail again, for ever; name another one"
            )
        return self


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
    certificate_fingerprints: tuple[str, ...] = ()  # SHA-256, of the servers' own certificates
    number_of_shards: int = Field(1, ge=1)  # of indices that we create
    number_of_replicas: int = Field(1, ge=0)
    bulk_documents: int = Field(1000, ge=1)
    bulk_bytes: int = Field(8 * 2**20, ge=1)
    flush_seconds: float = Field(1.0, gt=0)  # a row waits no longer than this for its bulk to fill
    num_writers: int = Field(2, ge=1)
    outbox_documents: int = Field(8192, ge=1)
    outbox_bytes: int = Field(256 * 2**20, ge=1)
    request_timeout_seconds: float = Field(30.0, gt=0)
    connect_timeout_seconds: float = Field(15.0, gt=0)
    max_backoff_seconds: float = Field(5.0, gt=0)
    breaker_failures: int = Field(5, ge=1)  # failed calls in a row that open the breaker


class WorkerSettings(_Part):
    """The worker itself: its window of documents, its HTTP face, its logs."""

    name: str | None = None  # in rows and dead letters; the host's name and process id where absent
    http_host: str = "127.0.0.1"
    http_port: int = Field(9464, ge=0, le=65535)  # 0: any free one
    grace_seconds: float = Field(30.0, ge=0)  # after SIGTERM, for what is in flight
    urgent_after_seconds: float = Field(300.0, gt=0)  # a document waiting longer, or this near its deadline, goes first
    engine_start_timeout_seconds: float = Field(600.0, gt=0)
    engine_silence_seconds: float = Field(30.0, ge=2)  # without a sign of life, which it gives each second: frozen
    engine_step_seconds: float = Field(0.0, ge=0)  # for one step: it hangs; 0: 1,800 on a CPU, 300 elsewhere
    engine_restarts: int = Field(3, ge=0)  # in a row without one output between; then the worker stops
    max_failed_ratio: float = Field(0.5, gt=0, le=1)  # of a window; above it the worker stops. 1: no limit
    failed_window_documents: int = Field(2000, ge=1)
    max_consecutive_failures: int = Field(500, ge=0)  # then the worker stops; 0: no limit
    receipts: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"


class Settings(_Part):
    """All of it. `settings_reader.load_settings` is the one reader of file and environment."""

    kafka: KafkaSettings = KafkaSettings()
    elasticsearch: ElasticsearchSettings = ElasticsearchSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    worker: WorkerSettings = WorkerSettings()
    tasks: dict[str, Task] = Field(default_factory=dict)


def require_addresses(settings: Settings, *, model: bool = True) -> None:
    """Raises SettingsError that names every setting without which a worker cannot run."""
    missing = []
    if not settings.kafka.bootstrap_servers:
        missing.append('kafka.bootstrap_servers = ["host:9092"]')
    if not settings.elasticsearch.urls:
        missing.append('elasticsearch.urls = ["http://host:9200"]')
    if model and not settings.model.path:
        missing.append('model.path = "a Hugging Face folder or a GGUF file"')
    if missing:
        raise SettingsError(
            "not set, and nothing runs without: " + "; ".join(missing) + ". Give them in pagemill.toml, in the "
            "environment (PAGEMILL_KAFKA__BOOTSTRAP_SERVERS, ...) or with --set"
        )


def masked_settings(settings: Settings) -> dict[str, Any]:
    """The effective settings as plain JSON types, secrets as asterisks: fit to be printed."""
    plain = settings.model_dump(mode="json")
    plain["elasticsearch"]["urls"] = [without_credentials(url) for url in settings.elasticsearch.urls]
    plain["kafka"]["bootstrap_servers"] = [without_credentials(one) for one in settings.kafka.bootstrap_servers]
    return plain


def require_no_credentials(key: str, address: str, origin: str = "") -> None:
    """Raises SettingsError where the address holds any: `key` is the setting, `origin` where it was given."""
    if "@" in address:
        where = f" ({origin})" if origin else ""
        shown = without_credentials(address)
        raise SettingsError(f"{key}{where} holds credentials in {shown!r}; give them as {_CREDENTIALS_BELONG[key]}")


def without_credentials(address: str) -> str:
    """The address with asterisks for all that stands before its last '@'; as it is where there is none.

    Not by a parser of URLs: to one, an unescaped '#', '/' or '?' in a password ends the address before the '@'.
    """
    return _CREDENTIALS.sub(r"\1***@", address, count=1)
