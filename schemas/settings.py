"""Every setting: frozen, one class per owner, unknown keys refused with the nearest valid name.

Read once, in this order of strength: command-line flags, environment (`PAGEMILL_KAFKA__TOPICS`), one TOML file.
Secrets come from files or the environment and are never written in the TOML file.
"""

import dataclasses
import difflib
import json
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from schemas.errors import SettingsError
from schemas.inference import EngineSettings, ModelSettings
from schemas.task import Task

DEFAULT_SETTINGS_FILE = Path("pagemill.toml")
TASK_NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"
ENVIRONMENT_PREFIX = "PAGEMILL_"

# Read elsewhere, before any settings: the folder of fetched models, the settings file's own name, and what the tests
# of a checkout are told.
_ENVIRONMENT_ELSEWHERE = frozenset(
    {"PAGEMILL_CACHE", "PAGEMILL_CONFIG", "PAGEMILL_FUZZ_INPUTS", "PAGEMILL_REQUIRE_REAL_SERVERS"}
)
# Kubernetes gives every pod such names for every Service in its namespace, one called pagemill included.
_KUBERNETES_NAME = re.compile(r"^PAGEMILL_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP).*)?)$")


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
    """All of it. `load_settings` is the one reader of file and environment."""

    kafka: KafkaSettings = KafkaSettings()
    elasticsearch: ElasticsearchSettings = ElasticsearchSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    worker: WorkerSettings = WorkerSettings()
    tasks: dict[str, Task] = Field(default_factory=dict)


def load_settings(
    file: Path | None, overrides: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Settings:
    """File, then environment over it, then `overrides` (dotted key -> value; text is read like the environment's).

    `file=None` reads `pagemill.toml` where there is one. Raises SettingsError with the key, its value and what to do.
    """
    environment = os.environ if environment is None else environment
    given = _Given()
    if file is None and DEFAULT_SETTINGS_FILE.is_file():
        file = DEFAULT_SETTINGS_FILE
    if file is not None:
        _read_file(file, given)
    _read_environment(environment, given)
    for key, value in overrides.items():
        path = tuple(key.split(".")) if not key.startswith("tasks.") else _split_task_key(key)
        given.put(path, value, "flag")
    given.require_no_secret("flag")
    given.require_known()
    for name in given.values.get("tasks", {}):
        if not re.fullmatch(TASK_NAME_PATTERN, name):
            raise SettingsError(f"task name {name!r}: 1 to 64 of letters, digits, '.', '_' and '-' are allowed")
    try:
        return Settings.model_validate(given.values)
    except ValidationError as error:
        raise SettingsError("\n".join(given.sentence(one) for one in error.errors())) from None


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
    plain["elasticsearch"]["urls"] = [_without_password(url) for url in settings.elasticsearch.urls]
    return plain


class _Given:
    """What was given so far: nested values, and where each leaf came from, for the sentences of errors."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def put(self, path: tuple[str, ...], value: Any, origin: str) -> None:
        """Sets one key; text is read as what the setting there wants: a list, an object, or left to pydantic."""
        annotation = _annotation_at(path)
        if isinstance(value, str) and annotation is not None:
            value = _from_text(value, annotation, ".".join(path), origin)
        if isinstance(value, Mapping) and (annotation is None or _children(annotation) is not None):
            for key, inner in value.items():
                self.put((*path, str(key)), inner, origin)
            if path[0] == "tasks" and len(path) == 2 and not value:
                self.set_value(path, {}, origin)
            return
        self.set_value(path, value, origin)

    def set_value(self, path: tuple[str, ...], value: Any, origin: str) -> None:
        here = self.values
        for key in path[:-1]:
            deeper = here.setdefault(key, {})
            if not isinstance(deeper, dict):
                raise SettingsError(f"{'.'.join(path)} ({origin}): {key} is already given as one value")
            here = deeper
        here[path[-1]] = value
        self.origins[".".join(path)] = origin

    def require_no_secret(self, origin: str) -> None:
        """Raises SettingsError where one was given there: every user of the machine can read a command's flags."""
        for key, came_from in self.origins.items():
            annotation = _annotation_at(tuple(key.split(".")))
            if came_from == origin and SecretStr in (annotation, *typing.get_args(annotation)):
                raise SettingsError(
                    f"{key} is a secret, and the machine's other users can read flags: give {key}_file, or "
                    f"{ENVIRONMENT_PREFIX}{key.replace('.', '__').upper()} in the environment"
                )

    def require_known(self) -> None:
        """Raises SettingsError for the first key that no setting has, with the nearest one that exists."""
        for path in _leaf_paths(self.values, Settings):
            parent, name = path[:-1], path[-1]
            known = _children(_annotation_at(parent)) or {}
            if known is _ANY_NAME or name in known:
                continue
            key = ".".join(path)
            origin = next((o for k, o in self.origins.items() if k == key or k.startswith(key + ".")), "settings")
            raise SettingsError(f"unknown setting {key} ({origin}); {_nearest(path, known)}")

    def sentence(self, error: Any) -> str:
        """One pydantic error in our words."""
        key = ".".join(str(part) for part in error["loc"])
        around = (o for k, o in self.origins.items() if f"{key}.".startswith(f"{k}.") or k.startswith(f"{key}."))
        origin = next(around, None)
        where = f" ({origin})" if origin else ""
        message = str(error["msg"]).removeprefix("Value error, ")
        if error["type"] == "value_error":
            return f"{key}{where}: {message}"
        message = _EXPECTED.get(error["type"], f"{message[0].lower()}{message[1:]}")
        return f"{key} is {_shown(error['loc'], error['input'])}{where}: {message}"


# pydantic's words for these are about Python's types, which a settings file does not have.
_EXPECTED = {
    "tuple_type": 'expected a list, such as ["a", "b"]',
    "too_short": "expected a list of one at the least",
    "model_type": "expected a table of settings",
    "dataclass_type": "expected a table of settings",
    "dict_type": "expected a table",
}
_CREDENTIALS = re.compile(r"//[^/@\s]*@")  # of an address, in whatever is quoted


def _shown(path: tuple[int | str, ...], value: Any) -> str:
    """A given value as an error may quote it: a secret is not repeated, nor the credentials of an address."""
    annotation = _annotation_at(tuple(str(part) for part in path))
    if SecretStr in (annotation, *typing.get_args(annotation)):
        return "***"
    return _CREDENTIALS.sub("//***@", repr(value))


_ANY_NAME: dict[str, Any] = {}  # the children of a table whose names the operator chooses


def _children(annotation: Any) -> dict[str, Any] | None:
    """Setting name -> its type, where the type is a table of settings; None where it is a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {name: field.annotation for name, field in annotation.model_fields.items()}
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return {field.name: hints[field.name] for field in dataclasses.fields(annotation)}
    if typing.get_origin(annotation) is dict and typing.get_args(annotation)[1] is Task:
        return _ANY_NAME
    return None


def _annotation_at(path: tuple[str, ...]) -> Any:
    """The type of the setting at a path; None where there is no such setting."""
    annotation: Any = Settings
    for name in path:
        children = _children(annotation)
        if children is _ANY_NAME:
            annotation = Task
        elif children is None or name not in children:
            return None
        else:
            annotation = children[name]
    return annotation


def _leaf_paths(values: Mapping[str, Any], annotation: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every given key that is a value, or that no setting knows."""
    children = _children(annotation)
    for name, value in values.items():
        child = Task if children is _ANY_NAME else (children or {}).get(name)
        if child is not None and _children(child) is not None and isinstance(value, Mapping):
            yield from _leaf_paths(value, child, (*path, name))
        else:
            yield (*path, name)


def _nearest(path: tuple[str, ...], known: dict[str, Any]) -> str:
    prefix = ".".join((*path[:-1], ""))
    elsewhere = [
        f"{section}.{path[-1]}"
        for section, annotation in (_children(Settings) or {}).items()
        if path[-1] in (_children(annotation) or {})
    ]
    close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
    if close or elsewhere:
        return f"did you mean {prefix + close[0] if close else elsewhere[0]}?"
    return f"known here: {', '.join(sorted(known))}"


def _from_text(text: str, annotation: Any, key: str, origin: str) -> Any:
    """A list from JSON or comma-separated text, an object from JSON; other text stays, pydantic reads numbers."""
    choices = [annotation, *typing.get_args(annotation)] if typing.get_origin(annotation) is not dict else [annotation]
    origins = [typing.get_origin(choice) or choice for choice in choices]
    is_table = _children(annotation) is not None or dict in origins
    if tuple not in origins and not is_table:
        return text
    stripped = text.strip()
    if is_table or stripped.startswith("["):
        try:
            return json.loads(stripped)
        except ValueError as error:
            # A whole section may hold a password somewhere.
            shown = "not JSON" if is_table else _shown((), text)
            raise SettingsError(f"{key} is {shown} ({origin}): expected JSON; {error}") from None
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_file(file: Path, given: _Given) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"settings file {str(file)!r} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {str(file)!r} cannot be read: {error}") from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"settings file {str(file)!r} is not TOML: {error}") from None
    for path in _leaf_paths(values, Settings):
        if SecretStr in (_annotation_at(path), *typing.get_args(_annotation_at(path))):
            key = ".".join(path)
            raise SettingsError(
                f"{key} is a secret and stands in {str(file)!r}; secrets are not written there: give {key}_file, or "
                f"{ENVIRONMENT_PREFIX}{'__'.join(path).upper()} in the environment"
            )
    urls = values.get("elasticsearch", {}).get("urls", ()) if isinstance(values.get("elasticsearch"), dict) else ()
    for url in urls if isinstance(urls, list) else ():
        if isinstance(url, str) and _without_password(url) != url:
            raise SettingsError(
                f"elasticsearch.urls in {str(file)!r} holds a password ({_without_password(url)}); secrets are not "
                "written there: give elasticsearch.username and elasticsearch.password_file"
            )
    for name, value in values.items():
        # Written types are kept as they are: only text from environment and flags is read as a list or an object.
        _put_written(given, (name,), value, str(file))


def _put_written(given: _Given, path: tuple[str, ...], value: Any, origin: str) -> None:
    annotation = _annotation_at(path)
    if isinstance(value, dict) and annotation is not None and _children(annotation) is not None:
        if path[0] == "tasks" and len(path) == 2:
            given.values.setdefault("tasks", {}).setdefault(path[1], {})  # a task of defaults alone is a task
        for key, inner in value.items():
            _put_written(given, (*path, key), inner, origin)
    else:
        given.set_value(path, value, origin)


def _read_environment(environment: Mapping[str, str], given: _Given) -> None:
    task_names = {name.lower(): name for name in given.values.get("tasks", {})}
    sections = _children(Settings) or {}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in _ENVIRONMENT_ELSEWHERE:
            continue
        rest = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if "__" not in rest and rest not in sections:
            if _KUBERNETES_NAME.match(variable):
                continue
            section = next((s for s in sections if rest.startswith(s + "_")), None)
            meant = f"{section}__{rest.removeprefix(f'{section}_')}" if section else None
            hint = (
                f"did you mean {ENVIRONMENT_PREFIX}{meant.upper()}?"
                if meant
                else f"names look like {ENVIRONMENT_PREFIX}KAFKA__TOPICS"
            )
            raise SettingsError(f"unknown setting {variable} (environment); {hint}")
        path = tuple(rest.split("__"))
        if path[0] == "tasks" and len(path) > 1:
            path = ("tasks", task_names.get(path[1], path[1]), *path[2:])
        given.put(path, environment[variable], f"environment {variable}")


def _split_task_key(key: str) -> tuple[str, ...]:
    """tasks.NAME.field[.field]: a task's name may hold dots, its fields do not."""
    parts = key.split(".")
    fields = _children(Task) or {}
    for at in range(2, len(parts)):
        if parts[at] in fields:
            return ("tasks", ".".join(parts[1:at]), *parts[at:])
    return tuple(parts)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{parts.netloc.rpartition('@')[2]}"))
