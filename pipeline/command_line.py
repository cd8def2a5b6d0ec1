"""What the commands have in common: their options, the settings out of them, and our errors as one sentence."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from schemas.errors import PagemillError, SettingsError
from schemas.settings import Settings, without_credentials
from schemas.settings_reader import load_settings

EXIT_FAILED = 1
EXIT_SETTINGS = 2  # also typer's own for wrong usage

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="PAGEMILL_CONFIG", help="Settings file; pagemill.toml here where absent."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="One setting, such as kafka.topics=a,b; stronger than file and environment."),
]
KafkaOption = Annotated[str | None, typer.Option("--kafka", help="Kafka addresses, comma-separated: host:9092.")]
ElasticsearchOption = Annotated[
    str | None, typer.Option("--elasticsearch", help="Elasticsearch addresses, comma-separated: http://host:9200.")
]
JobOption = Annotated[str | None, typer.Option("--job", help="Of this job only.")]
TaskOption = Annotated[str | None, typer.Option("--task", help="Of this task only.")]
FormatOption = Annotated[Literal["table", "jsonl"], typer.Option("--format")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="How many; 50 in a table, else all.")]


def load(config: Path | None, set_: list[str] | None, kafka: str | None, elasticsearch: str | None) -> Settings:
    """The settings of a command. Raises SettingsError."""
    overrides: dict[str, Any] = {}
    for one in set_ or ():
        key, equals, value = one.partition("=")
        if not equals or not key:
            given = without_credentials(one)
            raise SettingsError(f"--set {given!r}: write it as key=value, such as kafka.topics=pagemill.documents")
        overrides[key.strip()] = value
    if kafka is not None:
        overrides["kafka.bootstrap_servers"] = kafka
    if elasticsearch is not None:
        overrides["elasticsearch.urls"] = elasticsearch
    return load_settings(config, overrides)


@contextmanager
def quiet(
    config: Path | None, set_: list[str] | None, *, kafka: str | None = None, elasticsearch: str | None = None
) -> Iterator[Settings]:
    """The settings of a command that prints and logs nothing; an error of ours is told as by `told`."""
    from pipeline.logs import silence_logs

    silence_logs()
    with told():
        yield load(config, set_, kafka, elasticsearch)


@contextmanager
def counter(what: str) -> Iterator[Callable[[int, int], None]]:
    """A line on a terminal's standard error that counts (done, of how many); nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


@contextmanager
def told() -> Iterator[None]:
    """An error of ours is a sentence on standard error and an exit code, without a traceback."""
    try:
        yield
    except PagemillError as error:
        say(f"pagemill: {error}", err=True)
        raise typer.Exit(EXIT_SETTINGS if isinstance(error, SettingsError) else EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away: nothing to say, and nobody to say it to
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        discard_unwritten()
        say("pagemill: the disk is full: make room and run the command again", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def say(line: str, err: bool = False) -> None:
    """A line of which nothing depends: where it cannot be written it is lost, and changes no exit code."""
    with suppress(OSError):
        typer.echo(line, err=err)
    discard_unwritten()


def discard_unwritten() -> None:
    """Lets go of what a full disk did not take; the interpreter would try it again at its end, and fail for it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
