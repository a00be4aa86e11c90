"""Flower's simulation engine: bit for bit the rounds of our aggregator."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedone_sdk.backends import OnnxBackend
from fedone_sdk.local import simulate
from fedone_sdk.messages import RunResult
from tests.flower import federations
from tests.processes import free_port

pytest.importorskip(
    "flwr.app", reason="Flower conflicts with the cli extra: scripts/test-flower has it"
)

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower-app"
BIN = Path(sys.executable).parent


def environment(home: Path) -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    quiet |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(home), "PATH": path}


def check(result: RunResult, own: RunResult) -> None:
    assert result.alpha_sha256 == own.alpha_sha256
    assert result.prompt == own.prompt
    assert result.metric == own.metric
    assert result.spent.queries == own.spent.queries
    assert [r.mean_loss for r in result.history] == [r.mean_loss for r in own.history]


def test_nodes_that_learn(tmp_path: Path) -> None:
    """What a method remembers on a node lasts in Flower's context."""
    own = federations.of_our_own(federations.federation(tmp_path, **federations.GRADIENT))
    program = str(ROOT / "tests/flower/simulated.py")
    done = subprocess.run(
        [sys.executable, program, str(tmp_path), "GRADIENT"],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    check(RunResult.model_validate_json((tmp_path / "result.json").read_text()), own)


@contextmanager
def superlink(home: Path) -> Iterator[None]:
    """A SuperLink for simulations, and ``flwr``'s config that names it."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\n'
        "insecure = true\n"
    )
    command = [BIN / "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"]
    with (home / "superlink.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--disable-runtime-dependency-installation"],
            env=environment(home),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            while not _listens(port):
                assert process.poll() is None, (home / "superlink.log").read_text()
                time.sleep(0.1)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_flwr_run_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app as people start it, with the embedded model, and a store."""
    monkeypatch.syspath_prepend(APP)
    from fedone_flower.run import federation

    wanted = federation(4, 3, 28)

    async def ours() -> RunResult:
        async with OnnxBackend() as backend:
            return await simulate(wanted, backend=backend, transport="memory")

    own = asyncio.run(ours())
    out, store = tmp_path / "result.json", tmp_path / "run.db"
    config = f'nodes=4 rounds=3 queries=28 result="{out}" store="{store}"'
    nodes = "num-supernodes=4 client-resources-num-cpus=1 client-resources-num-gpus=0.0"
    command = [BIN / "flwr", "run", APP, "here", "--stream"]
    with superlink(tmp_path):
        done = subprocess.run(
            [*command, "--run-config", config, "--federation-config", nodes],
            env=environment(tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert out.exists(), done.stdout + done.stderr
    result = RunResult.model_validate_json(out.read_text())
    check(result, own)
    assert result.spent.queries == 28  # the cap
    assert f"prompt {own.prompt.text!r}, 28 of 28 queries" in done.stdout
