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
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default one prints local variables: private texts are among them.
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Asked for with each line: a live display puts itself in the place of stderr.
        logger_factory=_current_stderr,
        cache_logger_on_first_use=False,
    )


def json_logs(level: str = "info", **always: str) -> None:
    """One JSON object a line, to stdout.

    Args:
        level: Lines of this level and worse.
        always: What every line says beside its own.
    """

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
