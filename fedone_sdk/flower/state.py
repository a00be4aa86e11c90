"""An edge client's state folder, kept in Flower's context between two messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

Kept = dict[str, bytes]
"""File contents by path, the oldest first."""


@contextmanager
def kept_folder(before: Mapping[str, bytes]) -> Iterator[tuple[Path, Kept]]:
    """Create a folder with the stored files, for the duration of one message.

    Args:
        before: The stored files.

    Yields:
        The folder, and its files at the end of the ``with`` block.
    """
    after: Kept = {}
    with TemporaryDirectory(prefix="fedone-node-") as name:
        folder = Path(name)
        for path, content in before.items():
            file = folder / path
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_bytes(content)
        yield folder, after
        files = [file for file in folder.rglob("*") if file.is_file()]
        # The client drops the oldest files if there are too many.
        for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            after[file.relative_to(folder).as_posix()] = file.read_bytes()
