"""What is wrong with a template is told at start; what a document could make of a good one stays small."""

import tracemalloc
from typing import Any

import pytest

from pipeline.prompts import PromptBuilder, compile_tasks
from pipeline.templates import check_templates
from schemas.errors import DocumentError, SettingsError
from schemas.task import Task
from tests.pipeline.parts import ByteTokenizer, engine_info, make_document, shown


def rendered(template: str, **fields: Any) -> str:
    tasks = compile_tasks({"t": Task(template=template, chat=False)}, ByteTokenizer())
    builder = PromptBuilder(tasks, ByteTokenizer(), engine_info(max_model_len=10**7))
    return shown(builder.prepare(make_document(task="t", fields=fields)).token_ids)


@pytest.mark.parametrize("call", ["range(n)", "dict(a=1)", "namespace()", "now()", "text()"])
def test_a_template_that_calls_what_is_not_there_is_refused_at_start(call: str) -> None:
    with pytest.raises(SettingsError, match=r"tasks\.t\.template, line 2: \w+\(\) is no function here"):
        check_templates({"t": Task(template="\n{% for i in [" + call + "] %}{{ i }}{% endfor %}")})


def test_a_templates_own_macros_and_an_objects_methods_are_called() -> None:
    template = "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice(text.upper()) }}"
    assert rendered(template, text="ab") == "ABAB"


@pytest.mark.parametrize(
    "template",
    [
        "{{ text * n }}", "{{ [1] * n }}", "{{ text | center(n) }}", "{{ text.center(n) }}", "{{ text.rjust(n) }}",
        "{{ text.ljust(n) }}", "{{ text.zfill(n) }}", "{{ text | indent(n) }}", "{{ '%*d' % (n, 1) }}",
        "{{ '%*d' | format(n, 1) }}", "{{ '{:>{}}'.format(text, n) }}", "{{ 2 ** n }}", "{{ '\\t'.expandtabs(n) }}",
        "{{ [1] | batch(n, 'x') | list }}", "{{ long | replace('', long) }}", "{{ long.replace('', long) }}",
        "{{ long | join(long) }}", "{{ long.join(long) }}", "{{ long | map('upper') | join(long) }}",
    ],
)  # fmt: skip
def test_a_document_cannot_make_a_template_fill_the_memory(template: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DocumentError, match=r"too (many|large)"):
            rendered(template, text="ab", n=10**9, long="x" * 10_000)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("template", ["{{ 'a' * 10**9 }}", "{{ 'a' | center(10**9) }}", "{{ '%1000000000d' % 1 }}"])
def test_so_can_no_constant_of_the_template_itself(template: str) -> None:
    with pytest.raises((DocumentError, SettingsError)):
        rendered(template, text="ab")


def test_what_stays_small_works_as_in_any_template() -> None:
    template = "{{ text | center(6) }}|{{ items | map('upper') | join(', ') }}|{{ '%5.1f' % n }}|{{ 'x' * 3 }}|" \
               "{{ text.replace('a', 'c') }}|{{ '{:>4}'.format(text) }}"  # fmt: skip
    assert rendered(template, text="ab", items=["a", "b"], n=2) == "  ab  |A, B|  2.0|xxx|cb|  ab"


def test_a_stop_that_would_end_a_label_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"sampling\.stop holds 'o', which is in the label 'no'"):
        Task.model_validate({"kind": "classify", "labels": ["yes", "no"], "sampling": {"stop": ["o"]}})
    task = Task.model_validate(
        {"kind": "classify", "labels": ["yes", "no"], "sampling": {"stop_token_ids": [ord("y")]}}
    )
    with pytest.raises(SettingsError, match="stop_token_ids holds 121, a token of the label 'yes'"):
        compile_tasks({"t": task}, ByteTokenizer())


def test_a_documents_stop_that_would_end_a_label_fails_it_by_name() -> None:
    task = Task(kind="classify", labels=("yes", "no"), template="{{ text }}", chat=False)
    builder = PromptBuilder(compile_tasks({"t": task}, ByteTokenizer()), ByteTokenizer(), engine_info())
    document = make_document(task="t", fields={"text": "x"}, sampling={"stop": ["es"]})
    with pytest.raises(DocumentError, match=r"sampling\.stop holds 'es', which is in the label 'yes'"):
        builder.prepare(document)
