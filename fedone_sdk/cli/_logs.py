"""What the library's log lines become: quiet for people, JSON for machines."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

__all__ = ["json_logs", "quiet_logs"]


def quiet_logs() -> None:
    """Warnings and worse, to stderr, in human form."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Asked for with each line: a live display puts itself in the place of stderr.
        logger_factory=_current_stderr,
        cache_logger_on_first_use=False,
    )


def json_logs() -> None:
    """Everything from info on, to stdout, one JSON object a line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )


def _current_stderr(*_: Any) -> structlog.PrintLogger:
    return structlog.PrintLogger(sys.stderr)
