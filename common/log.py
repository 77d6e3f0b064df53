"""Logs are events with keys and values, one line of JSON each (or coloured text on a terminal)."""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


class StandardError:
    """Standard error, without the errors of a full disk: work goes on without its log."""

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def configure(service: str, *, level: str = "info", json: bool | None = None) -> None:
    """Call once, in `__main__`. `json` None: text on a terminal, else JSON. Logs go to standard error."""
    as_json = not sys.stderr.isatty() if json is None else json
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, StandardError())),
    )
    structlog.contextvars.bind_contextvars(service=service)
