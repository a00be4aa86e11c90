"""Output files of commands: checked before the work, and written atomically."""

from __future__ import annotations

import os
from pathlib import Path

from fedone_sdk.errors import SpecError
from fedone_sdk.files import replace_file


def check_target(option: str, target: Path) -> None:
    """Checks that a file can be written.

    Raises:
        SpecError: It cannot be written.
    """
    place = _place(target)
    folder = place.parent
    # Pipes and devices need no write access to their folder.
    written = place if _is_special(place) else folder
    problem = (
        f"there is no folder {folder}"
        if not os.path.isdir(folder)
        else f"{target} is a folder"
        if os.path.isdir(place)
        else f"{written} cannot be written to"
        if not os.access(written, os.W_OK)
        else None
    )
    if problem is not None:
        raise SpecError(f"{option}: {problem}", source="arguments")


def write_file(option: str, target: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Writes or replaces a file atomically.

    The target of a link is replaced, and the link is kept. Pipes and devices are written directly.

    Args:
        option: Name of the option, for the message.
        target: The file.
        data: The contents; text is encoded as UTF-8.
        mode: The file's mode, masked by the process's umask.

    Raises:
        SpecError: It cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    place = _place(target)
    try:
        if _is_special(place):
            place.write_bytes(content)
        else:
            replace_file(place, content, mode=mode)
    except OSError as exc:
        raise SpecError(f"{option}: {target}: {exc.strerror or exc}", source="arguments") from exc


def _place(target: Path) -> Path:
    """The target of the file's links, unless that is a pipe without a name."""
    if not target.is_symlink() or _is_special(target):
        return target
    return Path(os.path.realpath(target))


def _is_special(path: Path) -> bool:
    """Whether the path is a pipe or a device, such as `/dev/stdout`."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
