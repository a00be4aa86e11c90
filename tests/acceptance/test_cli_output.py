"""Destinations of results: files before the screen, pipes, links, invalid targets."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from fedone_sdk.cli import _process
from fedone_sdk.cli._output import check_target, write_file
from fedone_sdk.errors import SpecError
from fedone_sdk.messages import RunResult
from tests.acceptance.tiny import RUN, write_sentences
from tests.console import Fedone

FILES = ("result.json", "prompt.json", "report.html")
CLOSED = subprocess.DEVNULL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_sentences(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Standard output without a reader, or on a full disk


def fedone_into(stdout: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shell = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh") if stdout == CLOSED else ()
    return subprocess.run(
        [*shell, sys.executable, "-m", "fedone_sdk.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


@contextmanager
def unread() -> Iterator[int]:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def full() -> Iterator[int]:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as file:
        yield file.fileno()


@pytest.mark.parametrize(("where", "code"), [(unread, 1), (full, 2)])
def test_what_was_paid_for_is_written_before_it_is_shown(
    folder: Path, where: Callable[[], AbstractContextManager[int]], code: int
) -> None:
    result, prompt, report = FILES
    tune = ("tune", "run.yaml", "--artefact", prompt, "--report", report)
    with where() as stdout:
        done = fedone_into(stdout, folder, *tune, "--json", result)
    assert RunResult.model_validate_json((folder / result).read_bytes()).rounds == 4
    assert all((folder / name).exists() for name in FILES)
    full_line = "output cannot be written: No space left on device"
    assert done.returncode == code
    assert (full_line in done.stderr.splitlines()) == (where is full)
    assert "Traceback" not in done.stderr


def test_streams_may_be_closed(folder: Path) -> None:
    tune = ("tune", "run.yaml", "--json", FILES[0])
    assert fedone_into(CLOSED, folder, *tune).returncode == 0
    assert RunResult.model_validate_json((folder / FILES[0]).read_bytes()).rounds == 4


async def test_two_signals_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_process, "_ONE_SIGNAL_S", 60.0)
    seen: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append("abort"))
    with _process.stopping(lambda: seen.append("stop"), then_cancel=True):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.01)
    signal.signal(signal.SIGTERM, before)
    assert seen == ["stop"]


def test_a_full_disk_costs_only_log_lines() -> None:
    _process._Printer(Mock(**{"write.side_effect": OSError("full")})).info("lost")


def test_a_file_that_fails_costs_none_of_the_others(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SpecError("--json: the disk is full", source="arguments")

    monkeypatch.setattr("fedone_sdk.cli._output.Output.write_json", fail)
    command = ("tune", "run.yaml", "--artefact", "prompt.json")
    code, out, err = fedone(*command, "--json", "r.json")
    assert code == 2
    assert "alpha_sha256" in out
    assert err.endswith("arguments: --json: the disk is full\n")
    assert (folder / "prompt.json").exists()
    code, out, err = fedone("score", "run.yaml", "--prompt", " so", "--json", "s.json")
    assert (code, err) == (2, "arguments: --json: the disk is full\n")
    assert "mean loss" in out


# What stands at the place of a file


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    place, link = tmp_path / "there" / "file", tmp_path / "link"
    link.symlink_to(place)
    for text in ("made", "replaced"):
        check_target("--output", link)
        write_file("--output", link, text)
        assert (link.readlink(), place.read_text()) == (place, text)
    assert [file.name for file in place.parent.iterdir()] == ["file"]
    link.unlink()
    link.symlink_to("nowhere/file")
    with pytest.raises(SpecError, match=f"--output: there is no folder {tmp_path}/nowhere"):
        check_target("--output", link)


def test_pipes_and_devices_are_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for target in pipe, tmp_path / "link":
        # A reader first, or the writer would wait for it.
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        check_target("--output", target)
        write_file("--output", target, "through")
        assert os.read(reader, 100) == b"through"
        os.close(reader)
        assert pipe.is_fifo()
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    check_target("--output", null)
    write_file("--output", null, b"gone")
    assert null.is_char_device()


# Servers that are no aggregators


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that answers everything with one body, and its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="server")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


HTML = b"<html>hi</html>"


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (["list"], HTML), (["list"], b'[{"a": 1}]'), (["show", "tiny", "--clients"], HTML),
        (["export", "tiny"], b'{"round": 0}\n["round"]\n'),
    ],
)  # fmt: skip
def test_an_answer_of_another_server_is_reported(
    fedone: Fedone, monkeypatch: pytest.MonkeyPatch, command: list[str], body: bytes
) -> None:
    monkeypatch.setenv("FEDONE_ADMIN_TOKEN", "t")
    with answering(body) as url:
        code, out, err = fedone("runs", *command, "--server", url)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("the aggregator's answer is malformed: ")


def test_only_the_runs_export_replaces_an_export(
    fedone: Fedone, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDONE_ADMIN_TOKEN", "t")
    for name in "tiny", "other":
        (folder / "run.yaml").write_text(RUN.replace("tiny", name))
        fedone("tune", "run.yaml", "--store", f"{name}.db")
        assert fedone("runs", "export", name, "--store", f"{name}.db").code == 0
    good, other = (folder / f"{name}.run.jsonl" for name in ("tiny", "other"))
    before = good.read_bytes()
    export = ("runs", "export", "tiny", "--server")
    with answering(HTML) as url:
        assert fedone(*export, url).code == 2
    for body, problem in (
        (
            b"\n".join(before.splitlines()[:-1]),
            "the first line of an export must be a run, and its last line a result",
        ),
        (other.read_bytes(), "sent run 'other' instead of 'tiny'"),
    ):
        with answering(body) as url:
            for form in "run", "prompt":
                found = fedone(*export, url, "--as", form)
                assert found == (2, "", f"{url}: {problem}\n")
    assert good.read_bytes() == before
    assert not (folder / "tiny.prompt.json").exists()
    with answering(before) as url:
        assert fedone(*export, url, "-o", "again.jsonl").code == 0
    assert (folder / "again.jsonl").read_bytes() == before
