"""The `pagemill dlq` commands."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

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
    quiet,
)
from schemas.errors import FailureCode, SettingsError
from schemas.settings import Settings

if TYPE_CHECKING:
    from pipeline.dlq import LetterFilter

dlq = typer.Typer(help="Dead letters as a work list: look at them, send them again, delete them.", no_args_is_help=True)

CodeOption = Annotated[list[str] | None, typer.Option("--code", help="Of this cause, such as BAD_MESSAGE; several.")]
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
        Literal["open", "replayed", "cut", "purged"] | None,
        typer.Option("--state", help="In this state only; all but the purged where absent."),
    ] = None,
    format_: FormatOption = "table",
    limit: LimitOption = None,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
) -> None:
    """Show the letters that fit, each once, and how many there are by cause."""
    from pipeline.dlq import LetterState
    from pipeline.show_letters import print_letters_jsonl, print_letters_table

    with quiet(config, set_, kafka=kafka) as settings:
        wanted = _letter_filter(code, job, task, since, until)
        states = frozenset(LetterState) - {LetterState.PURGED} if state is None else frozenset([LetterState(state)])
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
    from pipeline.show_letters import print_letter

    with quiet(config, set_, kafka=kafka) as settings:
        print_letter(settings, letter)


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
    from pipeline.replay import replay

    with quiet(config, set_, kafka=kafka, elasticsearch=elasticsearch) as settings:
        report = replay(settings, _letter_filter(code, job, task, since, until), is_dry=dry_run)
    for line in report.lines():
        typer.echo(line)
    if report.refused:
        raise typer.Exit(EXIT_FAILED)


@dlq.command("purge")
def dlq_purge(
    code: CodeOption = None,
    job: JobOption = None,
    task: TaskOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    before: Annotated[
        list[str] | None, typer.Option("--before", help="PARTITION/OFFSET: all that stands in front of it there.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Without it, it is only said what would be done.")] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    kafka: KafkaOption = None,
) -> None:
    """Put letters away. Their topic is a log, which can only lose its beginning.

    --before, --all, or --until alone delete that beginning, for good, whatever stands there. --code, --job, --task and
    --since choose: the letters that fit are marked, and shown and replayed no more, but stay in the topic until the
    beginning that they stand in is deleted.
    """
    with quiet(config, set_, kafka=kafka) as settings:
        wanted = _letter_filter(code, job, task, since, until)
        if chooses := code or job is not None or task is not None or since is not None:
            if before or all_:
                raise SettingsError(
                    "--before and --all delete the beginning of the topic, whatever stands there, and --code, --job, "
                    "--task and --since choose letters: give the ones or the others"
                )
        elif sum((bool(before), until is not None, all_)) != 1:
            raise SettingsError(
                "give one of --before PARTITION/OFFSET, --until TIME and --all, or choose by --code, --job, --task, "
                "--since"
            )
        if chooses:
            _mark_purged(settings, wanted, yes)
        else:
            _delete(settings, before or (), wanted, yes)


def _mark_purged(settings: Settings, wanted: "LetterFilter", yes: bool) -> None:
    from pipeline.dlq import open_letters
    from pipeline.purge import plan_marks, write_marks

    with open_letters(settings) as box:
        marks = plan_marks(box, wanted)
    if not yes:
        typer.echo(f"{len(marks)} letters fit; nothing was marked: give --yes to put them away for good")
        raise typer.Exit(EXIT_FAILED)
    write_marks(settings, marks)
    typer.echo(
        f"{len(marks)} letters are shown and replayed no more; their bytes stay in {settings.kafka.dead_letter_topic} "
        "until its beginning is deleted (--before, --until, --all)"
    )


def _delete(settings: Settings, before: Sequence[str], wanted: "LetterFilter", yes: bool) -> None:
    from pipeline.dlq import open_letters
    from pipeline.purge import delete, plan_deletion

    with open_letters(settings) as box:
        planned = plan_deletion(box, before, wanted.until_ms)
    for line in planned.lines():
        typer.echo(line)
    if not yes:
        typer.echo("nothing was deleted: give --yes to delete them for good")
        raise typer.Exit(EXIT_FAILED)
    delete(settings, planned)
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
