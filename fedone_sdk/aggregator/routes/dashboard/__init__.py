"""The page at ``/`` for people who watch runs: modules and styles as they are, no build step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FILES", "PAGE", "PAGE_HEADERS", "PageFile"]

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """A file as it is served."""

    body: bytes
    content_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> PageFile:
        """Return the content of a file."""
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        return cls(body=body, content_type=_TYPES[path.suffix], etag=etag)


PAGE = PageFile.read(_FOLDER / "index.html")
"""The page itself."""

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

FILES = {
    path.name: PageFile.read(path)
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES and path.name != "index.html"
}
"""Files of the dashboard, by name."""
