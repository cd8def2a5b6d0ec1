"""The `pagemill` command. Reads settings and arguments, calls the parts, and turns our errors into one sentence."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from pipeline.cli_dlq import dlq
from pipeline.command_line import (
    EXIT_FAILED,
    ConfigOption,
    ElasticsearchOption,
    FormatOption,
    JobOption,
    KafkaOption,
    LimitOption,
    SetOption,
    TaskOption,
    counter,
    load,
    quiet,
    say,
    told,
)
from schemas.document import DEFAULT_TASK
from schemas.settings import masked_settings

app = typer.Typer(
    help="A Kafka topic of documents becomes an Elasticsearch index of model answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(dlq, name="dlq")


@app.command()
def worker(
    until_drained: Annotated[bool, typer.Option("--until-drained", help="End when the backlog is done.")] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
    elasticsearch: ElasticsearchOption = None,
) -> None:
    """Answer the documents of the topics, until stopped or until the backlog is done."""
    from pipeline.logs import configure_logs
    from pipeline.worker import StoppedAtOnce, Worker

    with told():
        settings = load(config, set_, kafka, elasticsearch)
        configure_logs(settings.worker.log_level, settings.worker.log_format)
        try:
            summary = Worker(settings).run(until_drained)
        except StoppedAtOnce as stopped:
            say(f"pagemill: {stopped}", err=True)
            raise typer.Exit(128 + stopped.signal_number) from None
    for line in summary.lines():
        say(line)
    if summary.imbalance:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def submit(
    file: Annotated[str, typer.Argument(help="JSON lines or plain text lines; - for standard input.")],
    task: Annotated[str, typer.Option("--task", help="A task of the worker's settings.")] = "default",
    job: Annotated[str, typer.Option("--job", help="The job's name; results are found by it.")] = "default",
    input_format: Annotated[Literal["auto", "jsonl", "text"], typer.Option("--format")] = "auto",
    topic: Annotated[str | None, typer.Option("--topic", help="The first of kafka.topics where absent.")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
) -> None:
    """Send a file's documents to Kafka, one a line, after checking that every line is a document."""
    from pipeline.submit import submit_file

    with quiet(config, set_, kafka=kafka) as settings:
        num_sent = submit_file(settings, file, task, job, None if input_format == "auto" else input_format, topic)
    if not num_sent:
        typer.echo(f"{file} holds no documents: nothing was sent")
        return
    documents = "1 document" if num_sent == 1 else f"{num_sent} documents"
    typer.echo(f"{documents} sent to {topic or settings.kafka.topics[0]} as job {job}")
    if settings.tasks and task not in settings.tasks and task != DEFAULT_TASK:
        typer.echo(
            f"note: the settings here have no task {task!r}, only {', '.join(settings.tasks)}. A worker that does not "
            "have it either fails these documents as UNKNOWN_TASK",
            err=True,
        )


@app.command()
def results(
    job: JobOption = None,
    task: TaskOption = None,
    status: Annotated[Literal["answered", "failed"] | None, typer.Option("--status")] = None,
    format_: FormatOption = "table",
    limit: LimitOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    elasticsearch: ElasticsearchOption = None,
) -> None:
    """Show answers and failures out of Elasticsearch."""
    from pipeline.show_results import print_jsonl, print_table

    with quiet(config, set_, elasticsearch=elasticsearch) as settings:
        show = print_jsonl if format_ == "jsonl" else print_table
        show(settings, job, task, status, limit)


@app.command()
def audit(
    until: Annotated[
        Literal["committed", "end"],
        typer.Option("--until", help="Up to what the group has committed, or to the topic's end as it is now."),
    ] = "committed",
    topic: Annotated[list[str] | None, typer.Option("--topic", help="Of kafka.topics where absent.")] = None,
    job: JobOption = None,
    show: Annotated[int, typer.Option("--show", min=0, help="How many of what is not there to name.")] = 20,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
    elasticsearch: ElasticsearchOption = None,
) -> None:
    """Prove from topic and index alone that every document has its row; exit code 0 only then."""
    from pipeline.audit import audit as compare_topic_with_index

    with (
        quiet(config, set_, kafka=kafka, elasticsearch=elasticsearch) as settings,
        counter("Reading again") as on_progress,
    ):
        report = compare_topic_with_index(
            settings, topics=topic, until=until, job=job, num_named=show, on_progress=on_progress
        )
    with told():
        for line in report.lines():
            typer.echo(line)
    if not report.is_complete:
        raise typer.Exit(EXIT_FAILED)


@app.command("check-config")
def check_config(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Print the effective settings, secrets masked, or what is wrong with them."""
    with told():
        settings = load(config, set_, None, None)
        from pipeline.results import AnswerReader
        from pipeline.templates import check_templates

        check_templates(settings.tasks)
        for name, task in settings.tasks.items():
            AnswerReader(name, task)  # refuses an output_schema that is none
        for line in _toml_lines(masked_settings(settings)):
            typer.echo(line)


@app.command()
def demo(
    packages: Annotated[
        int | None, typer.Option(min=1, help="How many packages to ask about; what takes minutes here where absent.")
    ] = None,
    kafka_port: Annotated[int, typer.Option(help="Of the embedded Kafka; 0 for any free one.")] = 0,
    elasticsearch_port: Annotated[int, typer.Option(help="Of the embedded Elasticsearch; 0 for any.")] = 0,
) -> None:
    """Show the whole way of a document on this machine, with an embedded server and a small real model."""
    from pipeline.demo import run_demo

    with told():
        run_demo(packages, kafka_port, elasticsearch_port)


@app.command()
def schema(
    of: Annotated[Literal["message", "row"], typer.Argument(help="What comes in, or what goes out.")],
) -> None:
    """Print the JSON Schema of the message format or of the result format."""
    from pipeline.json_schema import message_schema, row_schema

    shown = message_schema() if of == "message" else row_schema()
    typer.echo(json.dumps(shown, indent=2))


def _toml_lines(settings: dict[str, Any]) -> Iterator[str]:
    """The settings as TOML; what is not set as a comment."""

    def table(path: tuple[str, ...], values: dict[str, Any]) -> Iterator[str]:
        if path:
            yield f"[{'.'.join(part if part.replace('_', '').isalnum() else json.dumps(part) for part in path)}]"
        inner = {}
        for key, value in values.items():
            if isinstance(value, dict) and key != "output_schema":
                inner[key] = value
            elif value is None:
                yield f"# {key} is not set"
            else:
                yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in inner.items():
            yield ""
            yield from table((*path, key), value)

    yield from table((), settings)


if __name__ == "__main__":
    app()
