"""Files that outlive a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic_core import SchemaError

from fedone_sdk import cli
from fedone_sdk.backends.local_models import models_folder
from fedone_sdk.cli._output import Output, write_file
from fedone_sdk.evaluation.engine import write_whole
from fedone_sdk.files import replace_file, sync_path, user_path
from tests.power import Disk, disk

__all__ = ["disk"]


def test_results_are_there_after_a_power_cut(tmp_path: Path, disk: Disk) -> None:
    write_file("--json", tmp_path / "result.json", "{}\n")
    write_whole(tmp_path / "trials" / "a.json", "[]\n")
    disk.cut()
    assert (tmp_path / "result.json").read_bytes() == b"{}\n"
    assert (tmp_path / "trials" / "a.json").read_bytes() == b"[]\n"


def test_the_mode_and_the_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    (tmp_path / f".a.{os.getpid()}").write_bytes(b"of a process that was killed")
    replace_file(file, b"secret", mode=0o600)
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"secret", 0o600)

    def fails(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"other")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert file.read_bytes() == b"secret"


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EACCES, False), (errno.EIO, True)],
)
def test_what_a_file_system_does_not_offer_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: bool
) -> None:
    def refuses(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuses)
    if raised:
        with pytest.raises(OSError, match=os.strerror(number)):
            sync_path(tmp_path)
    else:
        sync_path(tmp_path)


def test_paths_of_an_account_without_a_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    assert user_path("~/m.gguf") == Path("/home/a/m.gguf")
    assert user_path("~nobody-of-this-name/m") == Path("~nobody-of-this-name/m")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDONE_CACHE", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    monkeypatch.chdir(tmp_path)
    assert user_path("~/m.gguf") == Path("~/m.gguf")
    assert models_folder() == tmp_path / ".fedone" / "models"


SENT = "\x1b[2J\x1b]0;a title\x07a\nclient-0\r\x00\x9b\u202eé🙂"


@pytest.mark.parametrize("what", ["facts", "table"])
def test_nothing_in_them_moves_the_cursor(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(None)
    if what == "facts":
        output.facts({"name": SENT, "token": "all"})
    else:
        output.table(["name", "token"], [[SENT, "all"]])
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert "é🙂" in "".join(lines)


def test_ctrl_c_while_a_validator_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = SchemaError('Error building "model" validator:\n  KeyboardInterrupt: ')
    monkeypatch.setattr(cli, "_run", Mock(side_effect=interrupted))
    with pytest.raises(SystemExit, match="130"):
        cli.main()
