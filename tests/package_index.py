"""A package index on loopback with one wheel, for pip."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from zipfile import ZIP_DEFLATED, ZipFile

PATIENCE_S = 60.0


def make_wheel(distribution: str, version: str, members: Mapping[str, bytes]) -> bytes:
    """A wheel that holds some files next to its metadata."""
    package = distribution.replace("-", "_")
    folder = f"{package}-{version}.dist-info"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        for name, text in metadata.items():
            archive.writestr(f"{folder}/{name}", text)
    return buffer.getvalue()


class PackageIndex:
    """What the index serves, and what it was asked.

    Attributes:
        url: For ``PIP_INDEX_URL``.
        wheel: The bytes of the wheel.
        held: Whether a download stops in the middle until `released` is set.
        half_sent: Set when a download stops in the middle.
        released: Lets downloads end.
        cut: Whether the connection closes in the middle of a download.
        downloads: How often the wheel was asked for.
    """

    def __init__(self, url: str, distribution: str, version: str, wheel: bytes) -> None:
        self.url = url
        self.page = f"/simple/{distribution}/"
        self.file = f"/{distribution.replace('-', '_')}-{version}-py3-none-any.whl"
        self.wheel = wheel
        self.held = self.cut = False
        self.half_sent, self.released = Event(), Event()
        self.downloads = 0


@contextmanager
def package_index(distribution: str, version: str, wheel: bytes) -> Iterator[PackageIndex]:
    """Serves an index for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == index.page:
                digest = hashlib.sha256(index.wheel).hexdigest()
                link = f'<a href="{index.file}#sha256={digest}">{index.file[1:]}</a>'
                self._answer("text/html", f"<!DOCTYPE html><html><body>{link}</body></html>")
            elif self.path == index.file:
                index.downloads += 1
                self._send_wheel(index.wheel)
            else:
                self.send_error(404)

        def _answer(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def _send_wheel(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            try:
                self.wfile.write(content[:half])
                self.wfile.flush()
                if index.cut:
                    return
                if index.held:
                    index.half_sent.set()
                    index.released.wait(PATIENCE_S)
                self.wfile.write(content[half:])
            except ConnectionError:  # pip was killed
                return

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        index = PackageIndex(
            f"http://127.0.0.1:{server.server_port}/simple", distribution, version, wheel
        )
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield index
        finally:
            index.released.set()
            server.shutdown()
            thread.join()
