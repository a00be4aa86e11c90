"""`fedone client` as a process: options, log, exit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.backends import LLMBackend
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.integration.test_edge_network import SECRET, Authority, HttpProxy, server_context
from tests.runs import TOKEN, run_spec

ROOT = Path(__file__).parents[2]
WORDS = Vocabulary(candidates=(" good", " bad"))
ROWS = "".join(json.dumps({"text": f"text {n}", "label": n % 2}) + "\n" for n in range(6))


def spec_of(rounds: int, **participation: Any) -> RunSpec:
    return run_spec(method={"batch_size": 5}, participation=participation, rounds=rounds)


@asynccontextmanager
async def fedone_client(
    folder: Path, url: str, *options: str, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    (folder / "rows.jsonl").write_text(ROWS)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fedone_sdk.cli", "client", "--server", url),
        *("--data", "rows.jsonl", "--state", "state", *options),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FEDONE_TOKEN": TOKEN, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def serving(*specs: RunSpec, backend: LLMBackend | None = None) -> AsyncIterator[Aggregator]:
    backend = backend or ScriptedBackend()
    async with asyncio.timeout(60), Aggregator(backend=backend, enrolment_tokens=[TOKEN]) as served:
        for spec in specs:
            await served.add_run(spec, WORDS)
        yield served


async def test_a_run_without_noise_is_declined_and_one_with_noise_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundMachine, "MAX_LOST", 1)
    pytest.importorskip("dp_accounting")
    noise = {"clip": 2.0, "noise_multiplier": 4.0}
    noisy = RunSpec.model_validate({**spec_of(2).model_dump(mode="json"), "privacy": noise})
    options = ("--label", "label", "--field", "text")
    async with serving(spec_of(2)) as served:
        plain = served.service.runs["run"]
        url = await served.listen()
        declined = "the client requires noise, and the run asks for none"
        async with fedone_client(tmp_path, url, *options, FEDONE_PRIVACY="label:1.5") as process:
            while not plain.state.unfit:
                await asyncio.sleep(0.05)
            assert plain.state.unfit == {0: declined}
            assert plain.state.running  # It waits for others.
            await served.service.stop_run(plain)
            out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert declined in out.decode()
        private = await served.service.add_run(noisy.model_copy(update={"name": "private"}), WORDS)
        arguments = (*options, "--privacy", "label:1.5", "--run", "private")
        async with fedone_client(tmp_path, url, *arguments) as process:
            out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert private.state.status == "completed"
        spent = [json.loads(line) for line in out.splitlines() if b"privacy spent" in line]
        assert [line["epsilon"] < 1.5 for line in spent] == [True, True]


@pytest.mark.parametrize(
    ("labels", "code", "line"),
    [
        ({0: " no", 1: " yes"}, 0, "rows that fit run run: 6 of 6"),
        ({"low": " low", "high": " high"}, 1,
         "rows that fit run run: 0 of 6, because field 'label' is 0, not one of: low, high"),
    ],
)  # fmt: skip
async def test_check(tmp_path: Path, labels: dict[Any, str], code: int, line: str) -> None:
    spec = spec_of(2).model_dump(mode="json")
    spec["task"]["labels"] = labels
    async with serving(RunSpec.model_validate(spec)) as served:
        url = await served.listen()
        async with fedone_client(tmp_path, url, "--check") as process:
            out, err = await process.communicate()
    assert (process.returncode, err) == (code, b"")
    assert out.decode().splitlines() == [f"{url} accepts this client", line]


async def test_generated_texts_are_scored_by_the_function_of_the_runs_file(tmp_path: Path) -> None:
    task = {
        "template": "{prompt} {text}",
        "loss": "score",
        "score": {"regex": {"pattern": "good"}},
        "label_field": "none",
    }
    spec = run_spec(task=task, method={"name": "random", "batch_size": 5}, rounds=2)
    (tmp_path / "run.yaml").write_text(spec.model_dump_json(exclude_unset=True))
    echo = ScriptedBackend(write=lambda inputs, _: "".join(part.text for part in inputs))
    async with serving(spec, backend=echo) as served:
        run = served.service.runs["run"]
        url = await served.listen()
        async with fedone_client(tmp_path, url, "--check") as process:
            out, _ = await process.communicate()
            assert b"fedone client --run RUN.yaml" in out
        async with fedone_client(tmp_path, url, "--run", "run.yaml") as process:
            _, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert run.state.status == "completed"
        assert all(report.mean_loss < 1.0 for report in run.result().history)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--privacy", "8"), "--privacy: unit: "),
        (("--run", "gone.yaml"), "gone.yaml: "),
        (("--privacy", "example:8"), "unit 'example' needs a backend of the device's own"),
        (("--privacy", "label:8"), "label, fields: policy.privacy needs both"),
        (("--budget", "2000"), "--budget: '2000' must be UNIT=N"),
        (("--budget", "usd=5"), "policy.budget.usd: this client can only cap queries"),
    ],
)
async def test_a_requirement_that_cannot_be_kept(
    tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    pytest.importorskip("dp_accounting")
    async with fedone_client(tmp_path, "http://127.0.0.1:9", *options) as process:
        _, err = await process.communicate()
    assert process.returncode == 2
    assert problem in err.decode()
    assert err.count(b"\n") == 1


async def test_through_a_proxy_with_a_private_authority_and_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("device")
    async with serving(spec_of(2)) as served, HttpProxy() as proxy:
        run = served.service.runs["run"]
        url = await served.listen(ssl_context=server_context(authority, clients=True))
        certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
        trust = {"HTTPS_PROXY": proxy.url, "SSL_CERT_FILE": str(authority.file)}
        async with fedone_client(tmp_path, url, "--cert", str(certificate), **trust) as process:
            out, err = await process.communicate()
        assert (process.returncode, err) == (0, b"")
        assert run.state.status == "completed"
        assert proxy.seen
    events = [json.loads(line)["event"] for line in out.decode().splitlines()]
    work = ["waiting", "assigned", "scored", "updated"]
    assert events == [
        "working",
        "enrolled",
        *work[:2],
        "rows that fit run run: 6 of 6",
        *work[2:],
        *work,
        "waiting",
        "ended",
        "done",
    ]
    assert SECRET.encode() not in out
    assert TOKEN.encode() not in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_end_it_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    # It waits for work that does not come: the run needs two.
    async with serving(spec_of(2, min_clients=2)) as served:
        url = await served.listen()
        async with fedone_client(tmp_path, url) as process:
            while not served.service.dispatcher.num_polls:
                await asyncio.sleep(0.01)
            process.send_signal(number)
            out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out.splitlines()[-1])["event"] == "done"
