"""The systemd units: as systemd reads them, and the processes that they start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedone_sdk import assets
from tests.deploy.images import Image
from tests.deploy.machine import Machine
from tests.deploy.units import SYSTEMD, Unit
from tests.edge import entries
from tests.processes import running, tool, until

EXAMPLES = assets.path("companion_feedback") / "train.jsonl"
INSTANCES = {
    "fedone-aggregator.service": "fedone-aggregator.service",
    "fedone-edge@.service": "fedone-edge@factory.service",
}


def _loadable(unit: str, folder: Path) -> Path:
    """The unit with existing programs, which `systemd-analyze` checks for."""
    text = (SYSTEMD / unit).read_text()
    file = folder / INSTANCES[unit]
    file.write_text(re.sub(r"^ExecStart=/opt/fedone/bin/\S+", "ExecStart=/bin/true", text, flags=8))
    return file


def test_every_unit_is_tested() -> None:
    assert {path.name for path in SYSTEMD.glob("*.service")} == INSTANCES.keys()


@pytest.mark.parametrize("unit", INSTANCES)
def test_systemd_understands_it_and_it_is_hardened(unit: str, tmp_path: Path) -> None:
    analyze, file = tool("systemd-analyze", "apt-get install systemd"), _loadable(unit, tmp_path)
    command = [analyze, "verify", "--man=no", "--recursive-errors=no", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    # The exposure level is at most 2.0 of 10.
    command = [analyze, "security", "--offline=true", "--threshold=20", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes users")
def test_the_user_is_made(tmp_path: Path) -> None:
    sysusers = tool("systemd-sysusers", "apt-get install systemd")
    (tmp_path / "etc").mkdir()
    command = [sysusers, f"--root={tmp_path}", str(SYSTEMD / "fedone.sysusers.conf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "etc/passwd").read_text().splitlines()
    name, _, number, _, _, home, shell = line.split(":")
    assert (name, home) == ("fedone", "/var/lib/fedone")
    assert 0 < int(number) < 1000
    assert shell.endswith("nologin")


def test_units_name_no_secret_and_the_user_of_the_sysusers_file() -> None:
    (_, user, *_) = (SYSTEMD / "fedone.sysusers.conf").read_text().split()
    for unit in INSTANCES.values():
        found = Unit(name=unit.removesuffix(".service"), root=Path("/"))
        assert found.one("User") == found.one("Group") == user
        assert found.all("LoadCredential")
        assert not re.search("(TOKEN|PASSWORD|KEY)=", "\n".join(found.all("Environment")))
    # The aggregator also starts again if its database or its model was not available (status 2).
    assert not Unit(name="fedone-aggregator", root=Path("/")).all("RestartPreventExitStatus")


def test_the_units_work_together(edge_image: Image, tmp_path: Path) -> None:
    """Both, with the files next to them."""
    edge = Unit(name="fedone-edge@factory", root=tmp_path / "root")
    machine = Machine(tmp_path)
    etc = machine.path("/etc/fedone/edge")
    (etc / "factory.token").write_text(machine.enrolment)
    environment = (SYSTEMD / "edge.env").read_text()
    environment = environment.replace("https://fedone.example", machine.url)
    environment = environment.replace("/srv/fedone/reviews.jsonl", str(EXAMPLES))
    (etc / "factory.env").write_text(environment)
    program = edge_image.folder / "opt/fedone/bin/fedone"
    argv = [str(program) if word.endswith("/bin/fedone") else word for word in edge.argv()]
    state = edge.state_folder()
    with machine:
        machine.start()
        with running(argv, edge.environment(), tmp_path, "edge") as device, machine.device(2):
            until(lambda: machine.run()["rounds"] >= 2, device)
            assert device.stop() == 0
        machine.systemctl("stop", "fedone-aggregator")
    logs = device.log + machine.log()
    credential = json.loads(entries(state, "identity")[0])["credential"]
    assert credential not in logs
    for secret in machine.path("/etc/fedone/secrets").iterdir():
        assert secret.read_text() not in logs


@pytest.mark.heavy
@pytest.mark.parametrize("part", ["edge", "server"])
def test_install_puts_all_in_place_and_keeps_what_is_there(part: str, tmp_path: Path) -> None:
    environment = os.environ | {"DESTDIR": str(tmp_path), "PYTHON": sys.executable}
    install = [SYSTEMD / "install", part]
    subprocess.run(install, env=environment, check=True)
    etc = tmp_path / "etc/fedone"
    mine = [path for path in etc.rglob("*") if path.is_file()]
    names = {path.name for path in mine}
    assert ({"aggregator.yaml", "ENROLMENT_TOKEN"} <= names) == (part == "server")
    for path in mine:
        path.write_text("mine")
    subprocess.run(install, env=environment, check=True)
    assert {path.read_text() for path in mine} <= {"mine"}
    for unit in (tmp_path / "etc/systemd/system").iterdir():
        text = unit.read_text()
        for name in re.findall(r"^LoadCredential=.*:/etc/fedone/(secrets/\w+)$", text, flags=8):
            assert (etc / name).stat().st_mode & 0o777 == 0o600
        for program in re.findall(r"/opt/fedone/bin/\S+", text):
            assert os.access(f"{tmp_path}{program}", os.X_OK)
    fedone = tmp_path / "opt/fedone/bin/fedone"
    subprocess.run([fedone, "--version"], check=True, capture_output=True)


def test_install_refuses_what_it_does_not_know() -> None:
    done = subprocess.run([SYSTEMD / "install", "everything"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "edge|server" in done.stderr
