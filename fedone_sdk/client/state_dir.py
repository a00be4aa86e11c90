"""A device's state folder."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

import structlog

from fedone_sdk.errors import DataError
from fedone_sdk.files import replace_file, sync_path

_log = structlog.get_logger(__name__)


class StateDir:
    """Small files in one folder, each written atomically.

    The device continues on a full or broken disk: a file that cannot be written is kept in memory,
    with a warning in the log.

    Args:
        path: The folder, created with its parent, both readable by their owner only; None keeps
            everything in memory.

    Raises:
        DataError: The folder cannot be created.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._in_memory: dict[str, bytes] = {}
        if path is not None:
            try:
                for folder in (path.parent, path):
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as exc:
                raise DataError(f"{path}: cannot be used as a state folder: {exc}") from exc
            try:
                # A process that was killed may have left names and content in the machine's
                # cache. They are on the disk before this process relies on them.
                for found in (path.parent.parent, path.parent, path, *path.iterdir()):
                    sync_path(found)
            except OSError as exc:
                _log.warning("state folder cannot be synced", reason=str(exc))

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None."""
        if name in self._in_memory or self._path is None:
            return self._in_memory.get(name)
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            _log.warning("state file cannot be read", file=name, reason=str(exc))
            return None

    def write(self, name: str, content: bytes) -> bool:
        """Write a file.

        Returns:
            Whether it is durable; False if the write failed and it is in memory only.
        """
        if self._path is None:
            self._in_memory[name] = content
            return True
        try:
            replace_file(self._path / name, content, mode=0o600)
            self._in_memory.pop(name, None)
        except OSError as exc:
            self._in_memory[name] = content
            _log.warning("state file cannot be written", file=name, reason=str(exc))
            return False
        return True

    def append(self, name: str, content: bytes) -> bool:
        """Append to a file; a crash may leave a part of `content` there.

        Returns:
            As of `write`.
        """
        if self._path is None or name in self._in_memory:
            self._in_memory[name] = self._in_memory.get(name, b"") + content
            return self._path is None
        file = self._path / name
        try:
            is_new = not file.exists()
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            if is_new:
                sync_path(self._path)
        except OSError as exc:
            self._in_memory[name] = (self.read(name) or b"") + content
            _log.warning("state file cannot be written", file=name, reason=str(exc))
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self._in_memory.pop(name, None)
        if self._path is not None:
            try:
                (self._path / name).unlink(missing_ok=True)
            except OSError as exc:
                _log.warning("state file cannot be removed", file=name, reason=str(exc))

    def names(self, pattern: str) -> list[str]:
        """Return the names that match a pattern such as ``unsent-*.json``, the oldest first."""
        found: list[tuple[int, str]] = []
        if self._path is not None:
            for file in self._path.glob(pattern):
                try:
                    found.append((file.stat().st_mtime_ns, file.name))
                except OSError:
                    continue  # removed in the meantime
        kept = [name for name in self._in_memory if fnmatchcase(name, pattern)]
        return [name for _, name in sorted(found) if name not in self._in_memory] + kept

    def keep_newest(self, pattern: str, count: int) -> list[str]:
        """Remove the oldest files of a pattern beyond `count`; return their names."""
        surplus = self.names(pattern)[:-count]
        for name in surplus:
            self.remove(name)
        return surplus
