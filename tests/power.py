"""A disk that loses what was not synced when the power is cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Disk", "disk"]


class Disk:
    """Undoes what a power cut may: names that no sync of their folder followed, and contents.

    It watches `os.open` with ``O_CREAT``, `os.replace` and `os.fsync`. A cut leaves every file as
    bad as a file system is allowed to: new content that was not synced is gone, and so is a new
    name in a folder that was not synced.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._undo: dict[Path, list[Callable[[], object]]] = {}
        self._unsynced: dict[tuple[int, int], None] = {}
        self._open, self._replace, self._fsync = os.open, os.replace, os.fsync
        patch.setattr(os, "open", self._opened)
        patch.setattr(os, "replace", self._replaced)
        patch.setattr(os, "fsync", self._synced)

    def _opened(self, path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        is_new = flags & os.O_CREAT and not os.path.lexists(path)
        descriptor = self._open(path, flags, mode, **rest)
        if is_new:
            file = Path(os.path.abspath(path))
            self._undo.setdefault(file.parent, []).append(lambda: file.unlink(missing_ok=True))
            self._unsynced[_inode(descriptor)] = None
        return descriptor

    def _replaced(self, source: Any, target: Any) -> None:
        file = Path(os.path.abspath(target))
        before = file.read_bytes() if file.exists() else None

        def undo() -> None:
            if before is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(before)

        self._replace(source, target)
        self._undo.setdefault(file.parent, []).append(undo)

    def _synced(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self._unsynced.pop(_inode(descriptor), None)
        self._undo.pop(Path(os.readlink(f"/proc/self/fd/{descriptor}")), None)

    def cut(self, folder: Path) -> None:
        """Cuts the power."""
        for undo in reversed([step for steps in self._undo.values() for step in steps]):
            undo()
        for file in folder.rglob("*"):
            found = file.stat()
            if (found.st_dev, found.st_ino) in self._unsynced:
                file.write_bytes(b"")
        self._undo.clear()


def _inode(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk under all files that the test writes from here on."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    return Disk(monkeypatch)
