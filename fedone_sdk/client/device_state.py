"""What a device keeps: in one file, or in memory only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from fedone_sdk.errors import DataError

_log = structlog.get_logger(__name__)

Change = tuple[str, dict[str, Any]]
"""An SQL statement with named parameters; ``:server`` is the state's own."""


def change(statement: str, **values: Any) -> Change:
    """Return an SQL statement with its parameters."""
    return statement, values


class DeviceState:
    """A device's state for one server, given by its URL or name; this class stores nothing.

    The objects that use it hold what they need, so that a device without a folder, or with a disk
    that fails, continues in memory.

    Attributes:
        file: The database; None without one.
    """

    file: Path | None = None

    def __init__(self, server: str) -> None:
        self.server = server

    @property
    def lost_counts(self) -> Sequence[Path]:
        """Damaged files that may have a count of epsilon."""
        return ()

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query.

        Raises:
            DataError: They cannot be read.
        """
        return []

    def read(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none, with a warning, if they cannot be read."""
        try:
            return self.rows(query, **values)
        except DataError as exc:
            _log.warning("device state cannot be read", reason=str(exc))
            return []

    def write(self, *changes: Change) -> bool:
        """Apply changes in one transaction, which is durable on return.

        Returns:
            False, with a warning, if none of them was stored. Always True without a file.
        """
        return True

    def close(self) -> None:
        """Close the file; the next use opens it again."""


def open_state(state_dir: str | Path | None, server: str) -> DeviceState:
    """Return a device's state for one server; without a folder it is in memory only.

    Raises:
        DataError: The folder cannot be created.
    """
    if state_dir is None:
        return DeviceState(server)
    # Imported here: a device without a folder does not need SQLite.
    from fedone_sdk.client.state_file import StateFile

    return StateFile(Path(state_dir), server)
