"""Structured logs on standard error: one line per event, one access line per request.

No line holds what users write (documents, questions, answers) or a key. An error is logged by its
type and by the lines of code it passed through, never by its message, because the message may quote
user text. The loggers of uvicorn and of ragkv's own packages are written the same way.
"""

import logging
import sys
import traceback
from collections.abc import MutableMapping
from typing import Any

import structlog

from .settings import LogConfig

FRAMES = 12  # the most frames of a traceback in a log line, the innermost ones
CAUSES = 4  # the most errors of a chain of causes

log = structlog.get_logger("ragkv.api")  # the server's logger


def configure_logging(config: LogConfig, replica: str = "") -> None:
    """Send every log record of this process through structlog to standard error; each line names
    the `replica`.
    """

    def name_replica(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**event, "replica": replica} if replica else event

    as_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        name_replica,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _remove_messages,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _escape_controls,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Other packages log warnings and above only: their other lines may quote user text.
    root.setLevel(max(logging.WARNING, logging.getLevelName(config.level.upper())))
    for name in ("ragkv", "uvicorn", "uvicorn.error", "uvicorn.access"):
        known = logging.getLogger(name)
        # the middleware writes its own access line
        known.handlers = []
        known.propagate = name != "uvicorn.access"
        known.setLevel(config.level.upper())


def _escape_controls(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that escapes control characters, so that no text ends a line or moves a
    cursor.
    """
    for name, value in event.items():
        # the repr of other values escapes them
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    return event


def error_location(error: BaseException) -> str:
    """An error without its message: its type and the lines it passed through, innermost last; then
    its causes.
    """
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < CAUSES:
        frames = traceback.extract_tb(current.__traceback__)[-FRAMES:]
        lines = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        parts.append(
            f"{type(current).__module__}.{type(current).__qualname__} at {lines or 'no line'}"
        )
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )
    return " | caused by ".join(parts)


def _remove_messages(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that replaces an exception by its location."""
    info = event.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        event["error"] = error_location(error)
    event.pop("stack_info", None)
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        # otherwise the standard library's formatter adds the traceback
        record.exc_info = record.exc_text = None
        if record.name.startswith("uvicorn") and "Traceback" in str(event.get("event", "")):
            event["event"] = str(event["event"]).split("Traceback", 1)[0].strip()
    return event
