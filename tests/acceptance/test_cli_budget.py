"""`fedone budget`: lists and releases the leases of killed processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import fedone_sdk
from fedone_sdk.budget import NOTHING, Budget, SqliteLedger, Usage
from tests.console import Fedone

CAP = Budget(requests=3, usd=Decimal("0.03"))
WORST = Usage(requests=1, prompt_tokens=200, usd=Decimal("0.01"))

# Settles one of its leases, and leaves two open until its input ends or it is killed.
_CALLER = """
import sys
from decimal import Decimal
from fedone_sdk.budget import Budget, SqliteLedger, Usage

ledger = SqliteLedger(sys.argv[1], program="nightly")
worst = Usage(requests=1, prompt_tokens=200, usd=Decimal("0.01"))
for name in "abc":
    ledger.reserve(name, worst, Budget(requests=3, usd=Decimal("0.03")))
ledger.settle("a", Usage(requests=1, usd=Decimal("0.004")))
print("ready", flush=True)
sys.stdin.read()
ledger.settle("b", Usage(requests=1, usd=Decimal("0.002")))
ledger.settle("c", Usage(requests=1, usd=Decimal("0.002")))
"""


@contextlib.contextmanager
def caller(path: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(fedone_sdk.__file__).parents[1])}
    command = [sys.executable, "-W", "error", "-c", _CALLER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "spent.db"


@pytest.fixture
def killed(path: Path) -> int:
    """The process id of a caller that was killed with two open leases."""
    with caller(path) as process:
        process.kill()
        assert process.wait() == -signal.SIGKILL
        return process.pid


def shown(fedone: Fedone, *arguments: object) -> Any:
    code, out, err = fedone("budget", *arguments, "--json", "-")
    assert code == 0, err
    return json.loads(out)


def room(path: Path) -> int:
    """How many requests of 0.01 fit under the cap now."""
    return SqliteLedger(path).account(CAP).affordable(WORST, 100)


def test_leases_of_a_killed_process_are_named(fedone: Fedone, path: Path, killed: int) -> None:
    assert room(path) == 0
    found = shown(fedone, path)
    assert found["spent"]["usd"] == 0.004
    assert found["leased"]["usd"] == 0.02
    assert [lease["lease_id"] for lease in found["leases"]] == ["b", "c"]
    for lease in found["leases"]:
        assert lease["worst"] == WORST.model_dump(mode="json")
        assert lease["state"] == "ended"
        owner = (lease["host"], lease["pid"], lease["program"])
        assert owner == (platform.node(), killed, "nightly")
    code, out, _ = fedone("budget", path)
    assert code == 0
    assert "requests 1, USD 0.0040" in out
    assert " ".join(["b", str(killed), platform.node(), "nightly"]) in " ".join(out.split())


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("unspent", [False, True])
def test_a_released_lease_counts_as_spent_unless_it_was_not(
    fedone: Fedone, path: Path, unspent: bool
) -> None:
    arguments = ("--unspent",) if unspent else ()
    done = shown(fedone, path, "--release", "b", *arguments)
    charged = NOTHING if unspent else WORST
    assert (done["released"], done["charged"]) == (["b"], charged.model_dump(mode="json"))
    account = SqliteLedger(path).account(CAP)
    assert dict(account.leases) == {"c": WORST}
    assert account.spent == Usage(requests=1, usd=Decimal("0.004")) + charged
    assert room(path) == int(unspent)
    done = shown(fedone, path, "--release-dead", *arguments)
    assert (done["released"], done["leases"]) == (["c"], [])


def test_a_process_that_runs_keeps_its_leases(fedone: Fedone, path: Path) -> None:
    with caller(path) as process:
        assert {lease["state"] for lease in shown(fedone, path)["leases"]} == {"running"}
        assert shown(fedone, path, "--release-dead")["released"] == []
        code, _, err = fedone("budget", path, "--release", "b")
        assert code == 2
        assert f"lease 'b': its process {process.pid} (nightly) runs" in err
        assert set(SqliteLedger(path).account(None).leases) == {"b", "c"}
        process.communicate("", timeout=60)
        assert process.returncode == 0
    assert SqliteLedger(path).account(None).leases == {}


@pytest.mark.usefixtures("killed")
def test_a_process_of_the_same_id_is_another(fedone: Fedone, path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE leases SET pid = ?, opened_at = opened_at - 1e6", (os.getpid(),))
    assert {lease["state"] for lease in shown(fedone, path)["leases"]} == {"ended"}
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE leases SET host = 'elsewhere'")
    assert {lease["state"] for lease in shown(fedone, path)["leases"]} == {"unknown"}
    assert shown(fedone, path, "--release-dead")["released"] == []
    assert shown(fedone, path, "--release", "c", "--unspent")["released"] == ["c"]


def test_what_cannot_be_used_is_one_line(fedone: Fedone, tmp_path: Path) -> None:
    missing = tmp_path / "none.db"
    line = f"arguments: there is no file {missing}\n"
    assert fedone("budget", missing, "--release-dead") == (2, "", line)
    assert not missing.exists()
    file = tmp_path / "text.db"
    file.write_bytes(b"a text, and no database at all")
    code, _, err = fedone("budget", file)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"{file}: ")
    ledger = tmp_path / "spent.db"
    SqliteLedger(ledger)
    line = "arguments: lease 'x' is not open\n"
    assert fedone("budget", ledger, "--release", "x").err == line
