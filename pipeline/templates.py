"""Operators' templates: compiled in a sandbox that sees a document's fields and nothing else, and makes nothing huge.

A document's text is data: it is never compiled. What a document can choose are the arguments of a template's own
filters and methods, so each whose result may be longer than what goes in is measured before it runs.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment

from schemas.errors import SettingsError
from schemas.task import Task

MAX_MADE = 2**20  # characters or entries that one operation may make

_FIXED_WIDTH = re.compile(r"\d{7,}")  # in a format: wider than MAX_MADE
_CHOSEN_WIDTH = re.compile(r"%[-+ #0-9.]*\*|\{[^{}]*:[^{}]*\{")  # one that an argument chooses


def check_templates(tasks: Mapping[str, Task]) -> None:
    """Compiles every template and forgets it. Raises SettingsError, the task and the line named. Needs no model."""
    environment = TemplateEnvironment()
    for name, task in tasks.items():
        if task.template is not None:
            compile_template(name, task.template, environment)


def compile_template(
    name: str, template: str, environment: SandboxedEnvironment
) -> tuple[frozenset[str], jinja2.Template]:
    """The names that the template of the task `name` may read, and itself, compiled. Raises SettingsError."""
    try:
        parsed = environment.parse(template)
        names = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        for call in parsed.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in names:
                raise SettingsError(
                    f"tasks.{name}.template, line {call.lineno}: {call.node.name}() is no function here: a template "
                    "sees the document's fields, its own macros, and Jinja's filters and tests"
                )
        return names, environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(f"tasks.{name}.template, line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:
        raise SettingsError(f"tasks.{name}.template: {error.message}") from None
    except (RecursionError, MemoryError, ValueError, OverflowError) as error:  # constants are computed at once
        raise SettingsError(f"tasks.{name}.template cannot be compiled: {type(error).__name__}: {error}") from None


class TemplateEnvironment(SandboxedEnvironment):
    """Undefined names are errors, there are no globals, and what would make something huge is one too."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, keep_trailing_newline=False)
        self.globals.clear()
        for name, size_of in _FILTER_SIZES.items():
            self.filters[name] = _measured(self.filters[name], size_of)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(right) > 1024:
            raise SecurityError(f"a power of {right} is too large")
        if operator == "%" and isinstance(left, str):
            _require_format(left, right if isinstance(right, tuple) else (right,))
        for repeated, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(times, int) and isinstance(repeated, str | list | tuple | bytes):
                _require_small(len(repeated) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        subject = getattr(function, "__self__", None)
        if isinstance(subject, str) and (size_of := _METHOD_SIZES.get(function.__name__)) is not None:
            _require_small(size_of(subject, *args, **kwargs))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _require_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked


def _require_small(size: int) -> None:
    if size > MAX_MADE:
        raise SecurityError(f"{size} characters or entries out of one operation are too many")


def _require_format(pattern: str, arguments: tuple[Any, ...]) -> None:
    widths = [one for one in arguments if isinstance(one, int)] if _CHOSEN_WIDTH.search(pattern) else []
    if _FIXED_WIDTH.search(pattern) or any(abs(width) > MAX_MADE for width in widths):
        raise SecurityError("a field's width in a format is too large")


def _measured(filter_: Callable[..., Any], size_of: Callable[..., int]) -> Callable[..., Any]:
    """The same filter, its result's size required to be small beforehand."""
    num_passed = int(hasattr(filter_, "jinja_pass_arg"))  # Jinja's own first argument

    @functools.wraps(filter_)  # and its mark for that
    def measured(*args: Any, **kwargs: Any) -> Any:
        passed, (value, *rest) = args[:num_passed], args[num_passed:]
        if not isinstance(value, str | list | tuple | dict) and hasattr(value, "__next__"):
            value = list(value)  # of a filter before this one
        _require_small(size_of(value, *rest, **kwargs))
        return filter_(*passed, value, *rest, **kwargs)

    return measured


def _width(value: Any, width: Any = 0, *_: Any, **__: Any) -> int:
    return width if isinstance(width, int) else 0


def _indent(value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return (str(value).count("\n") + 1) * (width if isinstance(width, int) else len(str(width)))


def _replace(value: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    text = str(value)
    return len(text) + text.count(str(old)) * len(str(new))


def _join(value: Any, separator: Any = "", *_: Any, d: Any = "", **__: Any) -> int:
    return len(value) * len(str(separator or d)) if hasattr(value, "__len__") else 0


def _format(value: Any, *args: Any, **kwargs: Any) -> int:
    _require_format(str(value), (*args, *kwargs.values()))
    return 0


def _cells(value: Any, size: Any = 1, *_: Any, **__: Any) -> int:
    """Of `batch` and `slice`, which can fill up with what is not there."""
    return size if isinstance(size, int) else 0


_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "batch": _cells,
    "center": _width,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "slice": _cells,
}
_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "join": lambda separator, values: _join(values, separator),
    "ljust": _width,
    "replace": _replace,
    "rjust": _width,
    "zfill": _width,
}
