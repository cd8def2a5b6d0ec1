"""A model's chat template: Jinja that turns messages into text, in a sandbox, as Hugging Face's models expect it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import DocumentError, FailureCode, ModelError, Stage


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML; chat templates expect plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model writes, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind that Jinja asks for

    def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders messages. `variables` are what the template sees besides them: `bos_token`, `eos_token` and so on."""

    def __init__(self, source: str, variables: Mapping[str, str], origin: str) -> None:
        """Raises ModelError where the template does not compile; `origin` names the model in that sentence."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template of {origin} does not compile: {error}") from error
        self._variables = dict(variables)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The conversation as text. Raises DocumentError where the template refuses it, with the template's reason."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise DocumentError(
                FailureCode.BAD_MESSAGE, Stage.PROMPT, f"the model's chat template refuses these messages: {error}"
            ) from error
