"""Files that commands write: whole or not at all, and refused before the work."""

from __future__ import annotations

import os
from pathlib import Path

from fedone_sdk.errors import SpecError

__all__ = ["check_target", "write_file"]


def check_target(option: str, target: Path) -> None:
    """Looks whether a file can be written.

    Args:
        option: That names it, for the message.
        target: The file.

    Raises:
        SpecError: It cannot.
    """
    folder = target.parent
    problem = (
        f"there is no folder {folder}"
        if not folder.is_dir()
        else f"{target} is a folder"
        if target.is_dir()
        else f"{folder} cannot be written to"
        if not os.access(folder, os.W_OK)
        else None
    )
    if problem is not None:
        raise SpecError(f"{option}: {problem}", source="arguments")


def write_file(option: str, target: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Writes a file in the place of what is there, whole or not at all.

    Args:
        option: That names it, for the message.
        target: The file.
        data: What goes in; text as UTF-8.
        mode: Of the file, less the process's umask.

    Raises:
        SpecError: It cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        draft.replace(target)
    except OSError as exc:
        draft.unlink(missing_ok=True)
        raise SpecError(f"{option}: {target}: {exc.strerror or exc}", source="arguments") from exc
