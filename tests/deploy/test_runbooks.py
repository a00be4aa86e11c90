"""The runbooks' commands, in order, against real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.machine import Machine
from tests.pages import blocks
from tests.postgres import Cluster
from tests.processes import Process, fetch, free_port, running, tool

PAGES = Path(__file__).resolve().parents[2] / "docs" / "operations" / "runbooks"


class Page:
    """A page's commands, block by block, in one shell: variables and functions stay."""

    def __init__(self, name: str, machine: Machine, variables: Mapping[str, str] = {}) -> None:
        self.blocks = _commands(name)
        ((_, setup),) = _commands("README")
        given = {"OWNER": f"{os.geteuid()}:{os.getegid()}"} | variables
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in given.items())
        self._before = f"{setup}\n{exports}\n"
        self._machine = machine

    def run(self, *, kinds: tuple[str, ...] = ("",), count: int | None = None) -> str:
        """Runs the next blocks of these kinds, all or so many; the output of the last.

        Each runs in a separate shell with the variables that the earlier ones set.
        """
        output = ""
        while self.blocks and (count is None or count > 0):
            kind, script = self.blocks.pop(0)
            if kind not in kinds:
                continue
            state = self._machine.path("/tmp/shell")
            output = self._machine.do(
                f"set -a\n{self._before}\nif [ -e {state} ]; then . {state}; fi\n{script}\n"
                f"{{ export -p; declare -f; }} >{state}\n"
            )
            count = None if count is None else count - 1
        return output


def _commands(name: str) -> list[tuple[str, str]]:
    found = blocks((PAGES / f"{name}.md").read_text())
    return [(block.info, block.text) for block in found if block.language == "bash"]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """An aggregator on SQLite."""
    tool("curl", "apt-get install curl")
    with Machine(tmp_path) as found:
        yield found


@pytest.fixture
def on_postgres(machine: Machine, postgres: Cluster, database: str) -> dict[str, str]:
    """The machine's aggregator on PostgreSQL, with a separate role; how a shell reaches it."""
    role = f"{database}_role"
    password = machine.path("/etc/fedone/secrets/DATABASE_PASSWORD")
    postgres.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{password.read_text()}'")
    postgres.execute(f"ALTER DATABASE {database} OWNER TO {role}")
    url = f"postgresql://{role}@127.0.0.1:{postgres.port}/{database}"
    machine.configure(
        "aggregator.yaml", store={"url": url, "password": {"env": "DATABASE_PASSWORD"}}
    )
    return {"STORE": url, "PGPASSWORD": password.read_text()}


def test_every_page_is_run_here() -> None:
    tested = set(re.findall(r'Page\("([\w-]+)"', Path(__file__).read_text()))
    assert {page.stem for page in PAGES.glob("*.md")} - {"README"} == tested
    index = (PAGES / "README.md").read_text()
    assert all(f"({page}.md)" in index for page in tested)


def test_upgrade(machine: Machine) -> None:
    machine.start()
    machine.work(2)
    before = machine.run()
    page = Page("upgrade", machine)
    page.run(count=2)
    assert "newest" in page.run(count=1)
    page.run(count=1)
    assert page.blocks == []
    assert machine.run()["rounds"] == before["rounds"]
    assert machine.run()["alpha_sha256"] == before["alpha_sha256"]
    machine.work(1)


def test_backup_and_restore_with_sqlite(machine: Machine) -> None:
    machine.start()
    machine.work(2)
    saved = machine.run()
    page = Page("backup-and-restore", machine)
    page.run(count=3)
    export = machine.path("/var/backups/feedback.jsonl")
    (backup,) = machine.path("/var/backups").glob("fedone-*.db")
    assert {path.stat().st_mode & 0o777 for path in (export, backup)} == {0o600}
    machine.work(2)
    assert machine.run()["rounds"] > saved["rounds"]
    page.run()
    assert page.blocks == []
    _is_as(machine, saved)


def test_backup_and_restore_with_postgres(machine: Machine, on_postgres: dict[str, str]) -> None:
    tool("pg_dump", "apt-get install postgresql-client")
    machine.start()
    machine.work(2)
    saved = machine.run()
    page = Page("backup-and-restore", machine, on_postgres)
    page.run(kinds=("postgresql",), count=1)
    machine.work(2)
    page.run(kinds=("postgresql",), count=1)
    page.run()
    assert page.blocks == []
    _is_as(machine, saved)


def _is_as(machine: Machine, saved: dict[str, object]) -> None:
    """The run continues where it was, with the devices that it had."""
    found = machine.run()
    for key in "rounds", "alpha_sha256", "spent":
        assert found[key] == saved[key]
    machine.work(1)
    assert {entry["client_id"] for entry in machine.run()["history"]} == {
        str(client["client_id"]) for client in _clients(machine)
    }


def _clients(machine: Machine) -> list[dict[str, object]]:
    body = fetch(f"{machine.url}/v1/clients", token=machine.admin)
    assert body is not None
    return list(json.loads(body)["clients"])


def test_key_rotation(machine: Machine, on_postgres: dict[str, str]) -> None:
    tool("psql", "apt-get install postgresql-client")
    machine.start()
    machine.work(1)
    secrets = machine.path("/etc/fedone/secrets")
    old = {path.name: path.read_text() for path in secrets.iterdir()}
    page = Page("key-rotation", machine, on_postgres)
    page.run(count=2)
    assert fetch(f"{machine.url}/v1/runs", token=old["FEDONE_ADMIN_TOKEN"]) is None
    assert fetch(f"{machine.url}/v1/runs", token=machine.admin) is not None
    page.run(count=1)
    page.blocks.insert(0, page.blocks[0])
    for _ in range(2):  # each rotation revokes the latest token
        before = machine.enrolment
        assert "revoked" in page.run(count=1)
        assert machine.enrolment != before
        machine.work(1)  # Devices that were there do not notice.
        with pytest.raises(AssertionError, match=r"not valid|not known|revoked"):
            machine.do(_try_to_enrol(machine, before))
    page.run(count=1)
    assert [client["revoked_at"] is not None for client in _clients(machine)] == [False, True]
    page.run(kinds=("postgresql",))
    assert page.blocks == []
    new = {path.name: path.read_text().strip() for path in secrets.iterdir()}
    kept = {name for name in old if old[name] == new[name]}
    assert kept == {"OPENAI_API_KEY"}
    assert machine.run()["status"] == "running"
    logs = machine.log()
    assert not [name for name in old if old[name] in logs or new[name] in logs]


def _try_to_enrol(machine: Machine, token: str) -> str:
    data = machine.path("/tmp/one.jsonl")
    data.write_text('{"text": "It broke.", "label": 0}\n')
    return f"FEDONE_TOKEN={token} fedone client --server {machine.url} --data {data}"


def test_raise_a_budget(machine: Machine) -> None:
    machine.start()
    machine.work(1)
    page = Page("raise-a-budget", machine)
    page.run(count=2)
    assert machine.run()["cap"]["queries"] == 16_000
    assert "20000" in page.run().replace(",", "")
    assert page.blocks == []
    found = machine.run()
    assert (found["cap"]["queries"], found["status"]) == (20_000, "running")
    machine.work(1)


def test_stuck_run(machine: Machine, tmp_path: Path) -> None:
    port = free_port()
    task = {"template": "{prompt} {text} Pleased?", "labels": {"0": " no", "1": " yes"}}
    machine.configure("feedback.yaml", task=task)
    backend = {"kind": "openai", "model": "fake-1", "base_url": f"http://127.0.0.1:{port}/v1"}
    backend |= {"api_key_env": None, "retry": {"attempts": 1}}
    machine.configure("aggregator.yaml", backend=backend)
    with _model(port, tmp_path) as model:
        machine.start()
        machine.work(1)
        machine.systemctl("stop", "fedone-aggregator")
        model.stop()
    machine.start()
    page = Page("stuck-run", machine)
    page.run(count=1)
    said = page.run(count=1).splitlines()[-1]
    assert said.startswith("stopped paused: ")
    page.run(count=2)
    with _model(port, tmp_path):
        page.run()
        assert page.blocks == []
        assert machine.run()["status"] == "running"
        machine.work(1)


@contextmanager
def _model(port: int, folder: Path) -> Iterator[Process]:
    """A model of the machine that is away at times."""
    root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-m", "tests.fake_openai", "--port", str(port)]
    with running(argv, {**os.environ, "PYTHONPATH": root}, folder, "model") as model:
        model.says("http://")
        yield model


def test_lying_client(machine: Machine) -> None:
    machine.start()
    machine.work(8)
    page = Page("lying-client", machine)
    page.run(count=2)
    influence = json.loads(machine.path("/tmp/influence.json").read_text())
    liar = min(influence, key=lambda line: line["score"])["client_id"]
    assert "yes" in page.run(count=1)
    first = min(entry["round"] for entry in machine.run()["history"] if entry["client_id"] == liar)
    page.run(count=1)
    assert machine.run()["rounds"] == first // 10 * 10
    page.run()
    assert page.blocks == []
    assert [c["client_id"] for c in _clients(machine) if c["revoked_at"] is not None] == [liar]
