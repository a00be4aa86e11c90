"""The writes, syncs and removals of this process's SQLite, observed and stopped.

SQLite writes by functions of its own, which a test cannot patch by name. Its table of functions
for files (the VFS) is patched instead, so that the real SQLite runs, and each of its operations
can fail or be the last one before a power cut.
"""

from __future__ import annotations

import _sqlite3
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

_FULL, _IOERR, _CANTOPEN = 13, 10, 14
_CREATE = 0x4
_METHODS = 19
"""Entries of `sqlite3_io_methods` of version 3, the version number included."""
_WRITE, _TRUNCATE, _SYNC, _CLOSE = 3, 4, 5, 1

_Open = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_Delete = CFUNCTYPE(c_int, c_void_p, c_char_p, c_int)
_Write = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Truncate = CFUNCTYPE(c_int, c_void_p, c_int64)
_Sync = CFUNCTYPE(c_int, c_void_p, c_int)
_Close = CFUNCTYPE(c_int, c_void_p)
_Directory = CFUNCTYPE(c_int, c_char_p, POINTER(c_int))
_SetCall = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p)
_GetCall = CFUNCTYPE(c_void_p, c_void_p, c_char_p)


class _Vfs(ctypes.Structure):
    _fields_ = (
        ("version", c_int),
        ("file_size", c_int),
        ("max_path", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("data", c_void_p),
        ("open", c_void_p),
        ("delete", c_void_p),
        ("others", c_void_p * 11),
        ("set_call", c_void_p),
        ("get_call", c_void_p),
        ("next_call", c_void_p),
    )


class Target(Protocol):
    """What observes the operations; an exception fails one."""

    def inside(self, path: str) -> bool:
        """Return whether the file is observed."""
        ...

    def created(self, path: str, create: Callable[[], int]) -> int:
        """Open a file that may be new."""
        ...

    def writing(self, path: str) -> None:
        """Before a write or a cut of the file."""
        ...

    def synced(self, path: str) -> None:
        """Sync a file."""
        ...

    def folder_synced(self, path: str) -> None:
        """Sync the folder of a file."""
        ...

    def removed(self, path: str, remove: Callable[[], int]) -> int:
        """Remove a file."""
        ...


@dataclass
class Watch:
    """The observed files that are open, by the address of their handle."""

    opened: dict[int, str] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)


@contextmanager
def watching(target: Target) -> Iterator[Watch]:
    """Observe SQLite's operations on files.

    Args:
        target: Observes them.
    """
    library = ctypes.CDLL(_sqlite3.__file__)
    try:
        find = library.sqlite3_vfs_find
    except AttributeError:
        pytest.skip("this Python's SQLite has no public symbols")
    find.restype = POINTER(_Vfs)
    pointer = find(None)
    vfs, watch = pointer.contents, Watch()
    address = ctypes.cast(pointer, c_void_p)
    real_open, real_delete = _Open(vfs.open), _Delete(vfs.delete)
    get_call, set_call = _GetCall(vfs.get_call), _SetCall(vfs.set_call)
    real_directory = _Directory(get_call(address, b"openDirectory") or 0)
    tables: dict[int, Any] = {}

    def opened(vfs: int, name: int | None, handle: int, flags: int, found: int | None) -> int:
        path = "" if name is None else ctypes.string_at(name).decode()
        if not path or not target.inside(path):
            return real_open(vfs, name, handle, flags, found)

        def create() -> int:
            return real_open(vfs, name, handle, flags, found)

        ctypes.cast(handle, POINTER(c_void_p))[0] = None  # SQLite closes what has methods
        code = _code(
            _CANTOPEN, lambda: target.created(path, create) if flags & _CREATE else create()
        )
        methods = ctypes.cast(handle, POINTER(c_void_p))
        if methods[0]:
            methods[0] = ctypes.addressof(_patched(methods[0]))
            watch.opened[handle] = path
        return code

    def _patched(real: int) -> Any:
        if real not in tables:
            table = (c_void_p * _METHODS).from_buffer_copy(
                ctypes.string_at(real, _METHODS * ctypes.sizeof(c_void_p))
            )
            write, truncate = _Write(table[_WRITE]), _Truncate(table[_TRUNCATE])
            sync, close = _Sync(table[_SYNC]), _Close(table[_CLOSE])

            def written(handle: int, data: int, size: int, offset: int) -> int:
                code = _code(_IOERR, lambda: target.writing(watch.opened[handle]))
                return code or write(handle, data, size, offset)

            def truncated(handle: int, size: int) -> int:
                code = _code(_IOERR, lambda: target.writing(watch.opened[handle]))
                return code or truncate(handle, size)

            def synced(handle: int, flags: int) -> int:
                code = _code(_IOERR, lambda: target.synced(watch.opened[handle]))
                return code or sync(handle, flags)

            def closed(handle: int) -> int:
                watch.opened.pop(handle, None)
                return close(handle)

            ours = {_WRITE: _Write(written), _TRUNCATE: _Truncate(truncated)}
            ours |= {_SYNC: _Sync(synced), _CLOSE: _Close(closed)}
            for place, function in ours.items():
                table[place] = ctypes.cast(function, c_void_p).value
            watch.alive += [table, *ours.values()]
            tables[real] = table
        return tables[real]

    def removed(vfs: int, name: bytes, sync: int) -> int:
        path = name.decode()
        if not target.inside(path):
            return real_delete(vfs, name, sync)
        return _code(_IOERR, lambda: target.removed(path, lambda: real_delete(vfs, name, sync)))

    def directory(name: bytes, found: Any) -> int:
        """SQLite opens a folder only to sync it."""
        path = name.decode()
        code = _code(_CANTOPEN, lambda: target.folder_synced(path)) if target.inside(path) else 0
        return code or real_directory(name, found)

    ours = _Open(opened), _Delete(removed), _Directory(directory)
    before = vfs.open, vfs.delete
    vfs.open, vfs.delete = (ctypes.cast(each, c_void_p).value for each in ours[:2])
    set_call(address, b"openDirectory", ctypes.cast(ours[2], c_void_p))
    try:
        yield watch
    finally:
        vfs.open, vfs.delete = before
        set_call(address, b"openDirectory", None)
        # Files that are still open have functions of this test.
        _ALIVE.append((watch, ours))


_ALIVE: list[Any] = []


def _code(failed: int, operation: Callable[[], int | None]) -> int:
    """Return an operation's code; an exception cannot pass through SQLite."""
    try:
        return operation() or 0
    except OSError:
        return _FULL
    except BaseException:
        return failed
