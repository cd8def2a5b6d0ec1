"""Reads the settings, in this order of strength: command-line flags, environment (`PAGEMILL_KAFKA__TOPICS`), one TOML
file. What is wrong is said with the key, its value, where that came from, and what to do.
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
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError

from schemas.errors import SettingsError
from schemas.settings import TASK_NAME_PATTERN, Settings, require_no_credentials, without_credentials
from schemas.task import Task

DEFAULT_SETTINGS_FILE = Path("pagemill.toml")
ENVIRONMENT_PREFIX = "PAGEMILL_"

# Read elsewhere, before any settings: the folder of fetched models, the settings file's own name, and what the tests
# of a checkout are told.
_ENVIRONMENT_ELSEWHERE = frozenset(
    {"PAGEMILL_CACHE", "PAGEMILL_CONFIG", "PAGEMILL_FUZZ_INPUTS", "PAGEMILL_REQUIRE_REAL_SERVERS"}
)
# Kubernetes gives every pod such names for every Service in its namespace, one called pagemill included.
_KUBERNETES_NAME = re.compile(r"^PAGEMILL_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP).*)?)$")


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
        """Raises SettingsError where an address holds credentials, also where a stronger origin replaces it."""
        if path in _ADDRESSES and isinstance(value, list):
            for address in value:
                if isinstance(address, str):
                    require_no_credentials(".".join(path), address, origin)
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
_ADDRESSES = (("kafka", "bootstrap_servers"), ("elasticsearch", "urls"))


def _shown(path: tuple[int | str, ...], value: Any) -> str:
    """A given value as an error may quote it: a secret is not repeated, nor the credentials of an address."""
    annotation = _annotation_at(tuple(str(part) for part in path))
    if SecretStr in (annotation, *typing.get_args(annotation)):
        return "***"
    if annotation is not None and _children(annotation) is not None:
        return f"of type {type(value).__name__}"  # it stands for a whole section, which may hold a password somewhere
    is_address = annotation is None or any(path[: len(one)] == one for one in _ADDRESSES)
    return repr(_without_credentials(value) if is_address else value)


def _without_credentials(value: Any) -> Any:
    """The same value with no credentials in any text of it."""
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, dict):
        return {_without_credentials(key): _without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_credentials(inner) for inner in value]
    return value


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
