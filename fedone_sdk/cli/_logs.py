"""Log configuration of commands: warnings on stderr, or JSON lines on stdout."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def quiet_logs() -> None:
    """Logs warnings and errors to stderr, in human-readable form."""
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default formatter prints local variables, which may contain private texts.
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Resolved for each line, because a live display replaces stderr.
        logger_factory=_current_stderr,
        cache_logger_on_first_use=False,
    )


def json_logs(level: str = "info", **always: str) -> None:
    """Logs one JSON object per line to stdout."""

    def add(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**always, **event}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add,
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
    )


def _current_stderr(*_: Any) -> structlog.PrintLogger:
    return structlog.PrintLogger(sys.stderr)
