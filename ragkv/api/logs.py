"""Structured logs on standard error: one line an event, one access line a request.

What users write, documents, questions and answers, is in no line, and no key is: an error is logged by its kind and by
where it was raised, never by its message, which may quote what it choked on. The loggers of uvicorn and of ragkv's own
rooms come out the same way.
"""

import logging
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

from .settings import LogConfig

FRAMES = 12  # of a traceback, the innermost


@dataclass(slots=True)
class Observed:
    """What the access line of one request says beside its status; the route fills it in. It dies with the request."""

    prompt_tokens: int | None = None
    reused_tokens: int | None = None  # exact and fused
    answer_tokens: int | None = None
    ttft_s: float | None = None

    def fields(self) -> Mapping[str, int | float]:
        """What is known of it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in values.items()
            if value is not None
        }


def configure_logging(config: LogConfig) -> None:
    """Send every log record of this process through structlog to standard error."""
    as_json = config.format == "json" or (config.format == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_words,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    last: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(logging.WARNING, logging.getLevelName(config.level.upper())))  # others' lines may quote texts
    for name in ("ragkv", "uvicorn", "uvicorn.error", "uvicorn.access"):
        known = logging.getLogger(name)
        known.handlers, known.propagate = [], name != "uvicorn.access"  # the access line is ours
        known.setLevel(config.level.upper())


def logger() -> Any:
    """The server's logger."""
    return structlog.get_logger("ragkv.api")


def unforeseen(error: BaseException) -> None:
    """Log an error nobody expected: its kind and where it was raised."""
    logger().error("unforeseen_error", exc_info=error)


def where(error: BaseException) -> str:
    """An error without its words: its kind and the lines it came through, the innermost last; its causes behind."""
    parts: list[str] = []
    one: BaseException | None = error
    while one is not None and len(parts) < 4:
        frames = traceback.extract_tb(one.__traceback__)[-FRAMES:]
        lines = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        parts.append(f"{type(one).__module__}.{type(one).__qualname__} at {lines or 'no line'}")
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return " | caused by ".join(parts)


def _without_words(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor: an exception is where it was raised, not what it says."""
    info = event.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        event["error"] = where(error)
    event.pop("stack_info", None)
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        record.exc_info = record.exc_text = None  # else the formatter of the standard library adds it
        if record.name.startswith("uvicorn") and "Traceback" in str(event.get("event", "")):
            event["event"] = str(event["event"]).split("Traceback", 1)[0].strip()
    return event


__all__ = ["Observed", "configure_logging", "logger", "unforeseen", "where"]
