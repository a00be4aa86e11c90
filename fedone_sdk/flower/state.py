"""What an edge client keeps in its folder, kept in Flower's context between two messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["Kept", "kept_folder"]

Kept = dict[str, bytes]
"""Files by their paths, the oldest first."""


@contextmanager
def kept_folder(before: Mapping[str, bytes]) -> Iterator[tuple[Path, Kept]]:
    """A folder with what was kept, for the time of one message.

    Args:
        before: What was kept.

    Yields:
        The folder, and what it held at the end of the ``with`` block.
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
        # Which of them are old matters to the client, where there are too many.
        for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            after[file.relative_to(folder).as_posix()] = file.read_bytes()
