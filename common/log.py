"""Logs are events with keys and values, one line of JSON each (or coloured text on a terminal)."""

import logging
import sys

import structlog


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
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)
