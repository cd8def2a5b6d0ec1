"""The `pagemill dlq` commands."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeline.command_line import (
    EXIT_FAILED,
    ConfigOption,
    ElasticsearchOption,
    KafkaOption,
    SetOption,
    load,
    told,
)
from schemas.errors import FailureCode, SettingsError

if TYPE_CHECKING:
    from pipeline.dlq import LetterFilter

dlq = typer.Typer(help="Dead letters as a work list: look at them, send them again, delete them.", no_args_is_help=True)

CodeOption = Annotated[list[str] | None, typer.Option("--code", help="Of this cause, such as BAD_MESSAGE; several.")]
JobOption = Annotated[str | None, typer.Option("--job", help="Of this job only.")]
TaskOption = Annotated[str | None, typer.Option("--task", help="Of this task only.")]
SinceOption = Annotated[
    str | None, typer.Option("--since", help="Failed then or later: 2026-01-31T12:00:00Z, or 90s, 15m, 2h, 3d ago.")
]
UntilOption = Annotated[str | None, typer.Option("--until", help="Failed before then; written as for --since.")]


@dlq.command("list")
def dlq_list(
    code: CodeOption = None,
    job: JobOption = None,
    task: TaskOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    state: Annotated[
        Literal["open", "replayed", "cut"] | None, typer.Option("--state", help="In this state only.")
    ] = None,
    format_: Annotated[Literal["table", "jsonl"], typer.Option("--format")] = "table",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Letters; 50 in a table, else all.")] = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
) -> None:
    """Show the letters that fit, each once, and how many there are by cause."""
    from pipeline.dlq import LetterState
    from pipeline.logs import silence_logs
    from pipeline.show_letters import print_letters_jsonl, print_letters_table

    silence_logs()
    with told():
        settings = load(config, set_, kafka, None)
        wanted = _letter_filter(code, job, task, since, until)
        states = frozenset(LetterState if state is None else [LetterState(state)])
        show = print_letters_jsonl if format_ == "jsonl" else print_letters_table
        show(settings, wanted, states, limit)


@dlq.command("show")
def dlq_show(
    letter: Annotated[str, typer.Argument(help="PARTITION/OFFSET, as `list` shows it.")],
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
) -> None:
    """Print one letter in full, its message included, as JSON."""
    from pipeline.logs import silence_logs
    from pipeline.show_letters import print_letter

    silence_logs()
    with told():
        print_letter(load(config, set_, kafka, None), letter)


@dlq.command("replay")
def dlq_replay(
    code: CodeOption = None,
    job: JobOption = None,
    task: TaskOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
    elasticsearch: ElasticsearchOption = None,
) -> None:
    """Send the messages of the letters that fit to their topics again, each as its next attempt."""
    from pipeline.logs import silence_logs
    from pipeline.replay import replay

    silence_logs()
    with told():
        settings = load(config, set_, kafka, elasticsearch)
        report = replay(settings, _letter_filter(code, job, task, since, until), is_dry=dry_run)
    for line in report.lines():
        typer.echo(line)
    if report.refused:
        raise typer.Exit(EXIT_FAILED)


@dlq.command("purge")
def dlq_purge(
    before: Annotated[
        list[str] | None, typer.Option("--before", help="PARTITION/OFFSET: what stands in front of it there.")
    ] = None,
    until: UntilOption = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, it is only said what would be.")] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
) -> None:
    """Delete the beginning of the dead-letter topic, for good. A log cannot lose single records."""
    from pipeline.dlq import open_letters, plan_purge, purge
    from pipeline.logs import silence_logs

    silence_logs()
    with told():
        if sum((bool(before), until is not None, all_)) != 1:
            raise SettingsError("give one of --before PARTITION/OFFSET, --until TIME and --all")
        settings = load(config, set_, kafka, None)
        with open_letters(settings) as box:
            planned = plan_purge(box, before or (), _letter_filter(None, None, None, None, until).until_ms)
        for line in planned.lines():
            typer.echo(line)
        if not yes:
            typer.echo("nothing was deleted: give --yes to delete them for good")
            raise typer.Exit(EXIT_FAILED)
        purge(settings, planned)
    typer.echo("deleted")


def _letter_filter(
    codes: list[str] | None, job: str | None, task: str | None, since: str | None, until: str | None
) -> "LetterFilter":
    from pipeline.dlq import LetterFilter, parse_time

    known = [code.value for code in FailureCode]
    if unknown := [code for code in codes or () if code not in known]:
        raise SettingsError(f"there is no cause {unknown[0]!r}: known are {', '.join(known)}")
    now = datetime.now(UTC)
    return LetterFilter(
        frozenset(codes or ()),
        job,
        task,
        None if since is None else parse_time(since, now),
        None if until is None else parse_time(until, now),
    )
