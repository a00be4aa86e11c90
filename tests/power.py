"""A disk that loses unsynced data at a power cut."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from unittest import mock

import pytest

from tests import sqlite_files

Left = Literal["nothing", "names", "half"] | random.Random
"""What a cut leaves of what was not synced: nothing; the names of files, and no content; names,
and the first half of what changed; or by chance some names and some content, or zeros."""


@dataclass(eq=False)
class _File:
    """A file, whatever its name: its descriptor keeps its number from being used again."""

    descriptor: int
    synced: bytes

    def content(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)


@dataclass(frozen=True)
class _Change:
    """A folder's entry that was added, removed, or both, since the folder was last synced."""

    folder: Path
    removed: str | None = None
    added: str | None = None
    file: _File | None = None  # None is a folder.


class Disk:
    """One folder on a disk whose cache a power cut loses.

    It watches `os.open` with ``O_CREAT``, `os.mkdir`, `os.replace`, `os.unlink` and `os.fsync`,
    and the writes, syncs, new files and removals of SQLite (`tests.sqlite_files`). Content is safe
    once its file was synced, a name once its folder was. Python's files are not really synced,
    which would take long.

    Args:
        root: The folder; what is in it is safe.
        watch: Gets each operation before it happens (``before fsync state.sqlite3``) and after
            it; what it raises ends the operation. SQLite gets ``SQLITE_FULL`` for an `OSError`,
            and ``SQLITE_IOERR`` for anything else.
    """

    def __init__(self, root: Path, watch: Callable[[str], object] = lambda what: None) -> None:
        self.root = root.resolve()
        self._watch = watch
        self._real = {name: getattr(os, name) for name in _WATCHED}
        self._stack = ExitStack()
        self._safe: dict[Path, _File | None] = {}
        self._pending: list[_Change] = []
        self._files: dict[tuple[int, int], _File] = {}
        self._sqlite: sqlite_files.Watch | None = None

    def __enter__(self) -> Self:
        self._take_in()
        for name in _WATCHED:
            self._stack.enter_context(mock.patch.object(os, name, getattr(self, f"_{name}")))
        self._sqlite = self._stack.enter_context(sqlite_files.watching(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._forget()

    def cut(self, left: Left = "nothing") -> None:
        """Cuts the power: what was not synced is lost, or what `left` leaves of it."""
        self.check_closed()
        for change in self._pending:
            kept = left.random() < 0.5 if isinstance(left, random.Random) else left != "nothing"
            if kept:
                self._apply(change)
        tree = {
            path: None if file is None else _left_of(file, left)
            for path, file in self._safe.items()
        }
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else self._real["unlink"](path)
        for path, content in sorted(tree.items()):
            if path.parent.is_dir():  # else the folder's own name is lost
                self._real["mkdir"](path) if content is None else path.write_bytes(content)
        self._forget()
        self._take_in()

    def check_closed(self) -> None:
        """Check that a dead process's SQLite files are closed: they would hold its locks."""
        if self._sqlite is not None and self._sqlite.opened:
            gc.collect()
            assert not self._sqlite.opened, self._sqlite.opened

    # SQLite

    def inside(self, path: str) -> bool:
        """Return whether a path is on this disk."""
        return self._inside(path) is not None

    def created(self, path: str, create: Callable[[], int]) -> int:
        """SQLite opens a file that may be new."""
        file = Path(path)
        if os.path.lexists(file):
            return create()
        self._watch(f"before open {file.name}")
        code = create()
        if code == 0:
            made = self._keep(file, b"")
            self._pending.append(_Change(file.parent, added=file.name, file=made))
        self._watch(f"after open {file.name}")
        return code

    def writing(self, path: str) -> None:
        """SQLite writes to a file, or cuts it."""
        self._watch(f"before write {Path(path).name}")

    def synced(self, path: str) -> None:
        """SQLite syncs a file."""
        self._watch(f"before fsync {Path(path).name}")
        file = self._files[_number(Path(path))]
        file.synced = file.content()
        self._watch(f"after fsync {Path(path).name}")

    def folder_synced(self, path: str) -> None:
        """SQLite syncs the folder of a file."""
        self._sync_folder(Path(path).parent)

    def removed(self, path: str, remove: Callable[[], int]) -> int:
        """SQLite removes a file."""
        file = Path(path)
        if not os.path.lexists(file):
            return remove()
        self._watch(f"before unlink {file.name}")
        code = remove()
        self._pending.append(_Change(file.parent, removed=file.name))
        self._watch(f"after unlink {file.name}")
        return code

    # What is watched

    def _open(self, path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        file = self._inside(path)
        if file is None or not flags & os.O_CREAT:
            return self._opened(path, flags, mode, **rest)
        is_new = not os.path.lexists(file)
        if not is_new and flags & os.O_EXCL:
            return self._opened(path, flags, mode, **rest)  # refuses
        self._watch(f"before open {_shown(file)}")
        descriptor = self._opened(path, flags, mode, **rest)
        if is_new:
            made = self._keep(file, b"")
            self._pending.append(_Change(file.parent, added=file.name, file=made))
        try:
            self._watch(f"after open {_shown(file)}")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _mkdir(self, path: Any, mode: int = 0o777, **rest: Any) -> None:
        folder = self._inside(path)
        if folder is None or os.path.lexists(folder):
            self._real["mkdir"](path, mode, **rest)
            return
        self._watch(f"before mkdir {_shown(folder)}")
        self._real["mkdir"](path, mode, **rest)
        self._pending.append(_Change(folder.parent, added=folder.name))
        self._watch(f"after mkdir {_shown(folder)}")

    def _replace(self, source: Any, target: Any, **rest: Any) -> None:
        before, after = self._inside(source), self._inside(target)
        if before is None or after is None:
            self._real["replace"](source, target, **rest)
            return
        self._watch(f"before replace {_shown(after)}")
        self._real["replace"](source, target, **rest)
        moved = self._files[_number(after)]
        self._pending.append(_Change(after.parent, before.name, after.name, moved))
        self._watch(f"after replace {_shown(after)}")

    def _unlink(self, path: Any, **rest: Any) -> None:
        file = self._inside(path)
        if file is None or not os.path.lexists(file):
            self._real["unlink"](path, **rest)
            return
        self._watch(f"before unlink {_shown(file)}")
        self._real["unlink"](path, **rest)
        self._pending.append(_Change(file.parent, removed=file.name))
        self._watch(f"after unlink {_shown(file)}")

    def _fsync(self, descriptor: int) -> None:
        path = self._inside(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path is None:
            self._real["fsync"](descriptor)
            return
        if path.is_dir():
            self._sync_folder(path)
            return
        self._watch(f"before fsync {_shown(path)}")
        file = self._files[_number(descriptor)]
        file.synced = file.content()
        self._watch(f"after fsync {_shown(path)}")

    def _sync_folder(self, path: Path) -> None:
        self._watch(f"before fsync {_shown(path)}")
        for change in [each for each in self._pending if each.folder == path]:
            self._apply(change)
            self._pending.remove(change)
        self._watch(f"after fsync {_shown(path)}")

    # What is on the disk

    def _inside(self, path: Any) -> Path | None:
        found = Path(os.path.abspath(path))
        return found if found == self.root or self.root in found.parents else None

    def _opened(self, path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        descriptor: int = self._real["open"](path, flags, mode, **rest)
        return descriptor

    def _keep(self, path: Path, synced: bytes) -> _File:
        file = _File(self._opened(path, os.O_RDONLY), synced)
        self._files[_number(file.descriptor)] = file
        return file

    def _take_in(self) -> None:
        for path in self.root.rglob("*"):
            self._safe[path] = None if path.is_dir() else self._keep(path, path.read_bytes())

    def _forget(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()
        self._safe.clear()
        self._pending.clear()

    def _apply(self, change: _Change) -> None:
        if change.removed is not None:
            self._safe.pop(change.folder / change.removed, None)
        if change.added is not None:
            self._safe[change.folder / change.added] = change.file


_SECTOR = 512

_WATCHED = ("open", "mkdir", "replace", "unlink", "fsync")


def _left_of(file: _File, left: Left) -> bytes:
    synced, content = file.synced, file.content()
    if content == synced or left in ("nothing", "names"):
        return synced
    changed = [at for at, byte in enumerate(content) if synced[at : at + 1] != bytes([byte])]
    middle = changed[len(changed) // 2] if changed else 0
    half = content[:middle] + synced[middle:]
    if not isinstance(left, random.Random):
        return half
    longer = max(len(content), len(synced))
    sectors = b"".join(
        left.choice([content, synced])[at : at + _SECTOR] for at in range(0, longer, _SECTOR)
    )
    return left.choice([synced, half, content, sectors, synced + bytes(longer - len(synced))])


def _shown(path: Path) -> str:
    """The name, without what differs from run to run."""
    return "(draft)" if path.name.startswith(".") else path.name


def _number(file: int | Path) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_dev, found.st_ino


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk under the test's folder."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    with Disk(tmp_path) as watched:
        yield watched
