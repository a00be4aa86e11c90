"""Files that survive a crash: whole or not at all, and on the disk when a call returns."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["replace_file", "sync_folder"]

_NOT_OFFERED = {errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Writes a file in the place of what is there.

    After a crash, also of the machine, the file has its old content or the new one. On return it
    has the new one.

    Args:
        path: The file; its folder is there.
        content: What goes in.
        mode: Of the file, less the process's umask.

    Raises:
        OSError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)  # of a process of this id that was killed
        # Never open to more readers than the file itself, not even for a moment.
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk: files that were made, renamed or removed there.

    Does nothing where that cannot be asked for: on Windows, on some network file systems, and in a
    folder that may be written to and not read.

    Raises:
        OSError: The disk fails.
    """
    if os.name == "nt":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        if exc.errno not in _NOT_OFFERED:
            raise
