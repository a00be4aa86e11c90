"""A machine after deploy/systemd/install, below a folder, with its own `systemctl`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from tests.deploy.images import CONTAINERS
from tests.deploy.units import SYSTEMD, Unit
from tests.edge import edge_client
from tests.processes import Process, fetch, free_port, until

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "deploy/compose/runs/feedback.yaml"

# Asks the test, which is the parent of what it starts, and so can wait for its end.
_SYSTEMCTL = """\
#!{python} -IS
import socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    link.sendall(" ".join(sys.argv[1:]).encode() + b"\\n")
    sys.exit(link.makefile().read() or 0)
"""


class Machine:
    """The services of one machine, whose ``/`` is `root`."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._folder = folder
        self._processes: dict[str, Process] = {}
        self._stack = ExitStack()
        self._install()

    def path(self, name: str) -> Path:
        """A file of the machine."""
        return self.root / name.lstrip("/")

    @property
    def enrolment(self) -> str:
        """What devices enrol with, as the secrets say now."""
        return self.path("/etc/fedone/secrets/ENROLMENT_TOKEN").read_text().strip()

    @property
    def admin(self) -> str:
        """The admin's token, as the secrets say now."""
        return self.path("/etc/fedone/secrets/FEDONE_ADMIN_TOKEN").read_text().strip()

    def _install(self) -> None:
        """What `install` puts there, but for the package, which the tests have already."""
        etc = self.path("/etc/fedone")
        for name in "secrets", "edge":
            (etc / name).mkdir(parents=True)
        shutil.copy(SYSTEMD / "aggregator.yaml", etc)
        self.configure(
            "aggregator.yaml",
            listen=f"127.0.0.1:{self._port}",
            store=str(self.path("/var/lib/fedone/aggregator/fedone.db")),
            runs=["feedback.yaml"],
        )
        run = yaml.safe_load(RUN.read_text()) | {"rounds": 1000, "budget": {"queries": 8000}}
        (etc / "feedback.yaml").write_text(yaml.safe_dump(run, default_flow_style=None))
        for number, name in enumerate(_secret_names()):
            (etc / "secrets" / name).write_text(f"secret-{number}-of-the-tests")
        binaries = self.path("/opt/fedone/bin")
        binaries.mkdir(parents=True)
        shutil.copy(CONTAINERS / "with-secrets", binaries)
        for name in "/var/backups", "/tmp", "/var/lib/fedone/aggregator":
            self.path(name).mkdir(parents=True, exist_ok=True)
        program = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m fedone_sdk.cli "$@"\n'
        (binaries / "fedone").write_text(program)
        (binaries / "fedone").chmod(0o755)

    def configure(self, name: str, **keys: object) -> None:
        """Changes a file of /etc/fedone."""
        path = self.path("/etc/fedone") / name
        document = yaml.safe_load(path.read_text()) | keys
        path.write_text(yaml.safe_dump(document))

    # Services

    def __enter__(self) -> Self:
        # Not pytest's folder: a socket's path has at most 107 bytes.
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fedone-")))
        address = str(folder / "systemctl")
        machine = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                verb, *units = self.rfile.readline().decode().split()
                try:
                    for unit in units:
                        machine.systemctl(verb, unit.removesuffix(".service"))
                except AssertionError as exc:
                    self.wfile.write(f"{verb} failed: {exc}\n".encode())

        server = self._stack.enter_context(socketserver.ThreadingUnixStreamServer(address, Handler))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(server.shutdown)
        systemctl = self.path("/opt/fedone/bin/systemctl")
        systemctl.write_text(_SYSTEMCTL.format(python=sys.executable, address=address))
        systemctl.chmod(0o755)
        self._stack.callback(self._kill_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.popen.kill()
            process.popen.wait()

    def systemctl(self, verb: str, name: str) -> None:
        """Does what systemd would do with one of our units."""
        if verb in ("stop", "restart"):
            assert self._processes.pop(name).stop() == 0, name
        if verb in ("start", "restart"):
            assert name not in self._processes or self._processes[name].popen.poll() is not None
            unit = Unit(name=name, root=self.root)
            self._processes[name] = Process(
                unit.argv(), unit.environment(), unit.state_folder(), f"{self._folder}/{name}"
            )
        assert verb in ("start", "stop", "restart"), verb

    def start(self, name: str = "fedone-aggregator") -> None:
        """Starts a service; it is ready when this returns."""
        self.systemctl("start", name)
        until(lambda: fetch(f"{self.url}/readyz"), self._processes[name])

    def log(self, name: str = "fedone-aggregator") -> str:
        """What a service wrote, over all its lives."""
        return Path(f"{self._folder}/{name}.log").read_text()

    # Devices

    @contextmanager
    def device(self, number: int) -> Iterator[Future[None]]:
        """An edge client at work: the same one each time."""
        rows = [
            {"text": text, "label": label}
            for text, label in [("Works like a charm.", 1), ("It broke after a day.", 0)] * 8
        ]
        client = edge_client(
            self.url,
            token=self.enrolment,
            data=rows,
            name=f"device-{number}",
            state_dir=self._folder / f"device-{number}",
        )

        async def work() -> None:
            async with client:
                await client.run_forever()

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(asyncio.run, work())
            try:
                yield working
            finally:
                client.stop()

    def work(self, rounds: int) -> None:
        """Lets two devices work until the run has done so many rounds more."""
        goal = self.run()["rounds"] + rounds
        with ExitStack() as stack:
            devices = [stack.enter_context(self.device(number)) for number in range(2)]
            until(lambda: self.run()["rounds"] >= goal, self._processes["fedone-aggregator"])
        assert all(device.exception() is None for device in devices)

    def run(self) -> dict[str, Any]:
        """Where the run stands."""
        body = fetch(f"{self.url}/v1/runs/feedback", token=self.admin)
        assert body is not None, self.log()
        return dict(json.loads(body))

    # Runbooks

    def do(self, script: str, **variables: str) -> str:
        """Runs the commands of a page, as root of this machine would; their output."""
        for place in "/etc/fedone", "/opt/fedone", "/var/backups", "/var/lib/fedone":
            script = re.sub(rf"(?<![\w}}]){place}\b", f"{self.root}{place}", script)
        script = script.replace("http://127.0.0.1:8080", self.url)
        path = f"{self.root}/opt/fedone/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env={"PATH": path, "HOME": str(self._folder)} | variables,
            cwd=self.path("/tmp"),
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        with suppress(KeyError):
            assert self._processes["fedone-aggregator"].popen.poll() is None, self.log()
        return done.stdout


def _secret_names() -> list[str]:
    """Those that the units load."""
    unit = Unit(name="fedone-aggregator", root=Path())
    return sorted(line.partition(":")[0] for line in unit.all("LoadCredential"))
