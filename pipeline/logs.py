"""Structured logs to standard error: one event a line with its ids, ours and the libraries' alike."""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TextIO

import structlog

# What the libraries say below this is about their own machinery.
_LIBRARIES = ("kafka", "elastic_transport", "elasticsearch", "urllib3")
_REPEAT_SECONDS = 10.0
_MAX_REPEATED = 1000  # different messages that are told apart
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logs(level: str, log_format: Literal["json", "console"]) -> None:
    """Sets up structlog and the standard library's logging for this process. Called once, by the command."""
    number = getattr(logging, level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: Any
    if log_format == "json":
        last = [structlog.processors.format_exc_info]
        renderer = structlog.processors.JSONRenderer()
    else:
        last = []
        # Its own way to write a traceback shows every local variable, passwords among them.
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    stream: Any = _Stream(sys.stderr)
    structlog.configure(
        processors=[*shared, *last, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last, renderer],
            foreign_pre_chain=[*shared, _add_extra],
        )
    )
    if number > logging.DEBUG:
        handler.addFilter(LibraryRepeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    # It warns of every callback of a tenth of a second, which on a busy processor says nothing about Kafka.
    logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)


class _Stream:
    """A stream whose failures are nobody's: a full disk under the log costs its lines, and no document."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class LibraryRepeats(logging.Filter):
    """Of what a library says again and again, as of a server that is away, a line every ten seconds, which says how
    many were left out before it: kafka-python alone writes thirty a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._told: dict[tuple[str, str], tuple[float, int]] = {}  # -> when last, and how many times since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] not in _LIBRARIES:
            return True
        said, now = (record.name, str(record.msg)), self._clock()
        last, left_out = self._told.get(said, (float("-inf"), 0))
        if now - last < _REPEAT_SECONDS:
            self._told[said] = (last, left_out + 1)
            return False
        if len(self._told) >= _MAX_REPEATED:
            self._told.clear()
        self._told[said] = (now, 0)
        if left_out:
            record.left_out = left_out
        return True


def silence_logs() -> None:
    """For commands that a person waits for: what is wrong comes as one sentence, not as the libraries' own lines."""
    logging.getLogger().handlers[:] = [logging.NullHandler()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def _add_extra(_: Any, __: str, event: Any) -> Any:
    """`extra={...}` of a standard log call becomes keys of the event."""
    record: logging.LogRecord | None = event.get("_record")
    if record is not None:
        for key, value in vars(record).items():
            if key not in _STANDARD_ATTRIBUTES:
                event.setdefault(key, value)
        event["logger"] = record.name
    return event
