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
from fedone_sdk.errors import BudgetExhausted
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
    found = shown(fedone, "show", path)
    assert found["spent"]["usd"] == 0.004
    assert found["leased"]["usd"] == 0.02
    assert [lease["lease_id"] for lease in found["leases"]] == ["b", "c"]
    for lease in found["leases"]:
        assert lease["worst"] == WORST.model_dump(mode="json")
        assert lease["state"] == "ended"
        assert (lease["host"], lease["pid"], lease["program"]) == (
            platform.node(),
            killed,
            "nightly",
        )
        assert abs(lease["opened_at"] - path.stat().st_mtime) < 60
    code, out, _ = fedone("budget", "show", path)
    assert code == 0
    assert "requests 1, USD 0.0040" in out
    assert " ".join(["b", str(killed), platform.node(), "nightly"]) in " ".join(out.split())
    assert "ended" in out


@pytest.mark.usefixtures("killed")
def test_what_was_not_spent_makes_the_cap_whole(fedone: Fedone, path: Path) -> None:
    before = shown(fedone, "show", path)
    dry = shown(fedone, "release", path, "--dead", "--unspent", "--dry-run")
    assert (dry["released"], dry["dry_run"]) == (["b", "c"], True)
    assert shown(fedone, "show", path) == before
    done = shown(fedone, "release", path, "--dead", "--unspent")
    assert (done["released"], done["charged"]) == (["b", "c"], NOTHING.model_dump(mode="json"))
    account = SqliteLedger(path).account(CAP)
    assert account.leases == {}
    assert account.spent == Usage(requests=1, usd=Decimal("0.004"))
    assert room(path) == 2
    assert shown(fedone, "release", path, "--dead")["released"] == []


@pytest.mark.usefixtures("killed")
def test_what_may_have_been_sent_counts_as_spent(fedone: Fedone, path: Path) -> None:
    code, out, _ = fedone("budget", "release", path, "b", "--dry-run")
    assert code == 0
    charge = "counted as spent: requests 1, prompt tokens 200, USD 0.0100\n"
    assert f"leases that would be released: 1; {charge}" in out
    code, out, _ = fedone("budget", "release", path, "b")
    assert code == 0
    assert f"leases released: 1; {charge}" in out
    assert "their requests may have been sent and charged" in out
    account = SqliteLedger(path).account(CAP)
    assert dict(account.leases) == {"c": WORST}
    assert account.spent == Usage(requests=2, prompt_tokens=200, usd=Decimal("0.014"))
    with pytest.raises(BudgetExhausted):
        SqliteLedger(path).reserve("new", WORST, CAP)


def test_a_process_that_runs_keeps_its_leases(fedone: Fedone, path: Path) -> None:
    with caller(path) as process:
        assert {lease["state"] for lease in shown(fedone, "show", path)["leases"]} == {"running"}
        assert shown(fedone, "release", path, "--dead")["released"] == []
        code, _, err = fedone("budget", "release", path, "b", "c", "b")
        assert code == 2
        assert err == "".join(
            f"arguments: lease '{name}': its process {process.pid} (nightly) runs and may still "
            "settle it; stop it, or give --force\n"
            for name in "bc"
        )
        assert set(SqliteLedger(path).account(None).leases) == {"b", "c"}
        # By force, and wrongly so: what the process settles is what counts in the end.
        assert shown(fedone, "release", path, "b", "--force", "--unspent")["released"] == ["b"]
        assert shown(fedone, "release", path, "c", "--force")["released"] == ["c"]
        process.communicate("", timeout=60)
        assert process.returncode == 0
    account = SqliteLedger(path).account(None)
    assert account.leases == {}
    assert account.spent == Usage(requests=3, usd=Decimal("0.008"))


@pytest.mark.usefixtures("killed")
def test_a_process_of_the_same_id_is_another(fedone: Fedone, path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE owners SET pid = ?, opened_at = opened_at - 1e6", (os.getpid(),))
    assert {lease["state"] for lease in shown(fedone, "show", path)["leases"]} == {"ended"}
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE owners SET host = 'elsewhere'")
    assert {lease["state"] for lease in shown(fedone, "show", path)["leases"]} == {"unknown"}
    assert shown(fedone, "release", path, "--dead")["released"] == []
    assert shown(fedone, "release", path, "c", "--unspent")["released"] == ["c"]


def test_a_ledger_of_an_older_version(fedone: Fedone, path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE leases (lease_id TEXT PRIMARY KEY, worst TEXT NOT NULL)")
        db.execute("CREATE TABLE spent (only INTEGER PRIMARY KEY, used TEXT)")
        db.execute("INSERT INTO spent VALUES (0, ?)", (json.dumps(WORST.exact()),))
        db.execute("INSERT INTO leases VALUES ('old', ?)", (json.dumps(WORST.exact()),))
    SqliteLedger(path).reserve("new", WORST, CAP)
    found = {lease["lease_id"]: lease for lease in shown(fedone, "show", path)["leases"]}
    assert (found["old"]["state"], found["old"]["pid"]) == ("unknown", None)
    assert (found["new"]["state"], found["new"]["pid"]) == ("running", os.getpid())
    assert shown(fedone, "release", path, "--dead")["released"] == []
    code, out, _ = fedone("budget", "release", path, "old", "--unspent")
    assert code == 0
    assert "leases released: 1; counted as spent: nothing\n" in out
    assert "may have been sent" not in out
    # A program of the older version can still write.
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT INTO leases VALUES ('older', ?)", (json.dumps(WORST.exact()),))
    assert set(SqliteLedger(path).account(None).leases) == {"new", "older"}


def test_the_gateway_names_its_remedy(fedone: Fedone) -> None:
    code, out, err = fedone("gateway", "gateway.yaml", "--check")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("arguments: fedone gateway was removed: ")


def test_what_cannot_be_used_is_one_line(fedone: Fedone, tmp_path: Path) -> None:
    for command in ("show",), ("release", "--dead"):
        verb, *options = command
        missing = tmp_path / "none.db"
        assert fedone("budget", verb, missing, *options) == (
            2,
            "",
            f"arguments: there is no file {missing}\n",
        )
        assert not missing.exists()
        for name, content in ("text.db", b"a text, and no database at all"), ("empty.db", b""):
            file = tmp_path / name
            file.write_bytes(content)
            code, _, err = fedone("budget", verb, file, *options)
            assert (code, err.count("\n")) == (2, 1)
            assert err.startswith(f"{file}: ")
            assert file.read_bytes() == content
    ledger = tmp_path / "spent.db"
    SqliteLedger(ledger)
    assert fedone("budget", "release", ledger).err == "arguments: give LEASE_IDs or --dead\n"
    assert fedone("budget", "release", ledger, "x").err == "arguments: lease 'x' is not open\n"
    assert fedone("budget", "show", ledger).out.split() == [
        str(ledger),
        *("spent", "nothing", "leased", "nothing"),
    ]
