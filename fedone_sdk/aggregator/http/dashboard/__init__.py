"""The page at ``/`` for people who watch runs: modules and styles as they are, no build step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

__all__ = ["FILES", "PAGE", "file_response"]

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FOLDER = Path(__file__).parent / "static"

PAGE = _FOLDER / "index.html"
"""The page itself."""

FILES = {
    path.name: path for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES and path != PAGE
}
"""The other files of the dashboard, by name."""

_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def file_response(path: Path) -> web.FileResponse:
    """Return a file of the dashboard, or 304 if the browser has it."""
    headers: Mapping[str, str] = {
        # Revalidated each time: a page must not mix files of two versions.
        "Cache-Control": "no-cache",
        "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8",
        **(_PAGE_HEADERS if path == PAGE else {}),
    }
    return web.FileResponse(path, headers=headers)
