"""Printed texts that devices may have sent, and an early Ctrl-C."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from pydantic_core import SchemaError

from fedone_sdk import cli
from fedone_sdk.cli._output import Output

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
