"""A disk that loses unsynced data at a power cut."""

from __future__ import annotations

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

Left = Literal["nothing", "names", "half"] | random.Random
"""What a cut leaves of what was not synced: nothing; the names of files, and no content; names,
and the first half of the content; or by chance some names and some content, or zeros."""


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

    It watches `os.open` with ``O_CREAT``, `os.mkdir`, `os.replace`, `os.unlink` and `os.fsync`.
    Content is safe once its file was synced, a name once its folder was. Nothing is really synced,
    which would take long.

    Args:
        root: The folder; what is in it is safe.
        watch: Told of each operation before it happens (``before fsync journal-a.jsonl``) and
            after it; what it raises ends the operation.
    """

    def __init__(self, root: Path, watch: Callable[[str], object] = lambda what: None) -> None:
        self.root = root.resolve()
        self._watch = watch
        self._real = {name: getattr(os, name) for name in _WATCHED}
        self._stack = ExitStack()
        self._safe: dict[Path, _File | None] = {}
        self._pending: list[_Change] = []
        self._files: dict[tuple[int, int], _File] = {}

    def __enter__(self) -> Self:
        self._take_in()
        for name in _WATCHED:
            self._stack.enter_context(mock.patch.object(os, name, getattr(self, f"_{name}")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._forget()

    def cut(self, left: Left = "nothing") -> None:
        """Cuts the power: what was not synced is lost, or what `left` leaves of it."""
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

    # What is watched

    def _open(self, path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        file = self._inside(path)
        if file is None or not flags & os.O_CREAT:
            return self._opened(path, flags, mode, **rest)
        is_new = not os.path.lexists(file)
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
        self._watch(f"before fsync {_shown(path)}")
        if path.is_dir():
            for change in [each for each in self._pending if each.folder == path]:
                self._apply(change)
                self._pending.remove(change)
        else:
            file = self._files[_number(descriptor)]
            file.synced = file.content()
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


_WATCHED = ("open", "mkdir", "replace", "unlink", "fsync")


def _left_of(file: _File, left: Left) -> bytes:
    synced, content = file.synced, file.content()
    if content == synced or left in ("nothing", "names"):
        return synced
    more = content[len(synced) :] if content.startswith(synced) else b""
    half = synced + more[: len(more) // 2]
    if not isinstance(left, random.Random):
        return half
    return left.choice([synced, half, content, synced + bytes(len(more))])


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
