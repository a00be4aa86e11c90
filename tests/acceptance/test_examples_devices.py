"""The examples that are devices, run as programs with a real aggregator."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest

from fedone_sdk.messages import RunResult, RunTask, Tensor
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.processes import free_port
from tests.runs import run_spec

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WORDS = Vocabulary(candidates=(" good", " bad"))
LOSSES = json.loads((ROOT / "tests" / "vectors" / "losses.json").read_text())
ROWS = [{"text": f"text {n}", "label": n % 2} for n in range(8)]


def spec(**changes: Any) -> RunSpec:
    return run_spec(**{"method": {"batch_size": 3}, "rounds": 5, **changes})


def write(file: Path, rows: Iterable[dict[str, Any]] = ROWS) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@asynccontextmanager
async def program(
    name: str,
    served: LoopbackFederation,
    *arguments: object,
    folder: Path,
    warnings: str = "error",
    **options: Any,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """An example as a separate process, killed at the end if it still runs."""
    token = {"PYTHONPATH": str(ROOT), "FEDONE_TOKEN": served.token}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", warnings),
        EXAMPLES / name,
        *map(str, (served.url, *arguments)),
        cwd=folder,
        env={**os.environ, **token, **options.pop("env", {})},
        **options,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def printed(process: asyncio.subprocess.Process, wanted: str) -> str:
    """The first line that the program prints and that the pattern fits to its end."""
    assert process.stdout is not None
    async for line in process.stdout:
        if re.fullmatch(wanted, line.decode().rstrip("\n")):
            return line.decode().rstrip("\n")
    raise AssertionError(f"the program never printed {wanted!r}")


def texts(model: ScriptedBackend) -> set[str]:
    """The text fields of the model's queries."""
    parts = (part for query in model.asked for parts in query.inputs for part in parts)
    return {part.text for part in parts if part.kind == "field"}


def loaded(name: str) -> ModuleType:
    """An example's module."""
    module_spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


async def test_edge_client(tmp_path: Path) -> None:
    run = spec(
        task={"template": "{prompt} {text}", "loss": "score"},
        method={"name": "random", "num_samples": 2, "batch_size": 2},
        rounds=3,
    )
    rows = [{"text": f"mail me: {n}@home.example now", "keywords": ["0", "a"]} for n in range(4)]
    write(tmp_path / "rows.jsonl", rows)
    model = ScriptedBackend()
    async with (
        asyncio.timeout(60),
        LoopbackFederation(run, WORDS, backend=model) as served,
        program("edge_client.py", served, "rows.jsonl", folder=tmp_path) as process,
    ):
        assert await process.wait() == 0
        assert served.run.result().status == "completed"
    assert texts(model) == {"mail me: [mail] now"}


async def test_thread_app_continues_where_it_was(tmp_path: Path) -> None:
    """Ctrl-C ends it during work; after a restart it is the same device with the same work."""
    write(tmp_path / "rows.jsonl")
    asked, answers = asyncio.Event(), asyncio.Event()

    async def hold(query: object) -> None:
        asked.set()
        await answers.wait()

    model = ScriptedBackend(gate=hold)
    async with asyncio.timeout(60), LoopbackFederation(spec(), WORDS, backend=model) as served:
        async with program("thread_app.py", served, "rows.jsonl", folder=tmp_path) as process:
            await asked.wait()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
        (seat,) = served.run.state.seats
        assert seat.phase == "working"
        answers.set()
        piped: dict[str, Any] = {"folder": tmp_path, "stdout": asyncio.subprocess.PIPE}
        async with program("thread_app.py", served, "rows.jsonl", **piped) as process:
            out, _ = await process.communicate()
            assert process.returncode == 0
        result = served.run.result()
    assert "enrolled" not in out.decode().split("\n")
    assert (result.status, result.rounds) == ("completed", 5)
    assert result.spent.queries == len(model.asked) + result.cache.hits


async def test_aiohttp_app(tmp_path: Path) -> None:
    """A user's text sent over HTTP is in the app's next work; the app outlives the runs."""
    write(tmp_path / "rows.jsonl")
    arrived = asyncio.Event()
    app = f"http://127.0.0.1:{(port := free_port())}"

    async def hold(query: object) -> None:
        if len(model.asked) > 4:  # the first round is through; the others are of later rows
            await arrived.wait()

    model = ScriptedBackend(gate=hold)
    async with (
        asyncio.timeout(60),
        LoopbackFederation(spec(rounds=40), WORDS, backend=model) as served,
        program(
            *("aiohttp_app.py", served, "rows.jsonl", port),
            folder=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        ) as process,
        aiohttp.ClientSession(app) as user,
    ):
        await printed(process, "round 0 updated")
        for number in range(8):
            row = {"text": f"said {number}", "label": number % 2, "name": "not kept"}
            async with user.post("/feedback", json=row) as answer:
                assert answer.status == 201
        for wrong in (b"no JSON", b'["no row"]', b'{"text": "no label"}'):
            async with user.post("/feedback", data=wrong) as answer:
                assert answer.status == 422
        arrived.set()
        await printed(process, "round 39 updated")
        await served.aggregator.service.wait(served.run)
        async with user.get("/federation") as answer:
            assert (await answer.json())["event"] in ("updated", "waiting", "ended")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    held = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert held == ROWS + [{"text": f"said {n}", "label": n % 2} for n in range(8)]
    assert {f"said {n}" for n in range(8)} < texts(model)


class Terminal:
    """A terminal of a program: its user's eyes and fingers."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._seen = ""
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _read(self) -> None:
        with suppress(OSError):  # the program has closed its side
            plain = re.sub(r"\x1b\[[0-9;?<>=]*[A-Za-z]", "", os.read(self._ours, 65536).decode())
            self._seen += plain
        self._changed.set()

    async def shows(self, text: str) -> None:
        """Returns once the text was shown after all that was waited for before."""
        while text not in self._seen:
            self._changed.clear()
            await self._changed.wait()
        self._seen = self._seen.partition(text)[2]

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        os.close(self.theirs)


def device(folder: Path, *, charging: bool, wifi: bool) -> None:
    """A phone as Linux describes it: a battery, a charger, a radio, a modem."""
    for name, value in {
        "class/power_supply/BAT0/capacity": "80",
        "class/power_supply/AC/online": str(int(charging)),
        "class/net/wlan0/operstate": "up" if wifi else "down",
        "class/net/wlan0/wireless/keep": "",
        "class/net/wwan0/operstate": "up",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(value + "\n")


async def test_companion_app(tmp_path: Path) -> None:
    """The window is real, in a terminal; the work begins when the charger is plugged in."""
    write(tmp_path / "rows.jsonl")
    device(tmp_path, charging=False, wifi=True)
    model = ScriptedBackend()
    terminal = Terminal()
    async with (
        asyncio.timeout(90),
        LoopbackFederation(spec(), WORDS, backend=model) as served,
        program(
            *("companion_app/app.py", served, tmp_path / "rows.jsonl", "--system", tmp_path),
            folder=tmp_path,
            warnings="ignore",  # toga-textual says of each feature that a terminal has not
            stdin=terminal.theirs,
            stdout=terminal.theirs,
            stderr=terminal.theirs,
            env={"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
        ) as process,
    ):
        await terminal.shows("Paused: not charging")
        device(tmp_path, charging=True, wifi=False)
        await terminal.shows("not on wi-fi")
        terminal.press(" ")  # on the switch, which has the focus
        await terminal.shows("switched off")
        assert model.asked == []
        terminal.press(" ")
        device(tmp_path, charging=True, wifi=True)
        await terminal.shows("Updates: 5")
        await served.aggregator.service.wait(served.run)
        assert served.run.result().status == "completed"
        terminal.press("\x11")  # Ctrl-Q
        assert await process.wait() == 0
    terminal.close()


@asynccontextmanager
async def mosquitto(folder: Path, port: int) -> AsyncIterator[None]:
    """A real broker on a port of this machine."""
    found = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        assert "CI" not in os.environ, "mosquitto is missing: bash scripts/install-mosquitto"
        pytest.skip("mosquitto is not installed: bash scripts/install-mosquitto")
    config = folder / "mosquitto.conf"
    # As root it would become another user, who may not write here.
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\n")
    process = await asyncio.create_subprocess_exec(
        found, "-c", config, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if b"running" in line:
                break
        yield
    finally:
        process.terminate()
        await process.communicate()


async def test_mqtt_gateway(tmp_path: Path) -> None:
    """Thirty sensors, one client: all contribute equally, and no name is sent."""
    aiomqtt = pytest.importorskip("aiomqtt")
    port = free_port()
    model = ScriptedBackend()
    method = {"name": "gs-bdpl", "num_samples": 2, "batch_size": 32}
    async with (
        asyncio.timeout(90),
        LoopbackFederation(spec(rounds=30, method=method), WORDS, backend=model) as served,
        program(
            *("mqtt_gateway.py", served, "--broker", f"127.0.0.1:{port}", "--sensors", 30),
            folder=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        ) as process,
    ):
        # It is there before its broker is.
        await printed(process, "no broker: .*")
        async with mosquitto(tmp_path, port):
            await printed(process, "listening")
            async with aiomqtt.Client("127.0.0.1", port) as sensors:
                await sensors.publish("sensors/1/feedback", "no JSON", qos=1)
                await sensors.publish("sensors/1/feedback", '["no row"]', qos=1)
                for number in range(30):
                    for turn in range(200 if number == 1 else 1):
                        row = json.dumps({"text": f"sensor {number} says {turn}", "label": 1})
                        await sensors.publish(f"sensors/{number}/feedback", row, qos=1)
            await printed(process, "sensor 29")
            await printed(process, "ended")
            assert await process.wait() == 0
        result: RunResult = served.run.result()
    assert (result.status, result.rounds) == ("completed", 30)
    assert len({report.client_id for report in result.history}) == 1
    said = texts(model)
    assert {text.split(" says ")[0] for text in said} == {f"sensor {n}" for n in range(30)}
    of_the_talkative = {text for text in said if text.startswith("sensor 1 says")}
    assert of_the_talkative <= {f"sensor 1 says {turn}" for turn in range(150, 200)}
    assert "feedback" not in repr(model.asked)


@pytest.mark.parametrize("vector", LOSSES["losses"], ids=lambda vector: vector["name"])
def test_the_stdlib_client_has_the_losses_of_the_vectors(vector: dict[str, Any]) -> None:
    module, run, rows = loaded("stdlib_client.py"), json.loads(vector["run"]), vector["examples"]
    assert module.crc32(run["task"]) == run["task_crc32"]
    if run["task"]["loss"] != "cross_entropy":
        return  # It declines the work.
    answers, width = vector["answers"], len(run["task"]["labels"])
    flat = [value for row in answers for value in row]
    table = Tensor.pack(flat, (1, len(rows), width), "float32").model_dump()
    bias = Tensor.pack(vector.get("bias", [0] * width), (1, width), "float32").model_dump()
    scores = {"failed": [], "model": "m", "log_probs": table}
    found = module.update(run, {"biases": bias}, rows, scores, len(rows))
    if "by_class" in vector:
        assert found["class_counts"] == vector["class_counts"]
        values = [
            Tensor.model_validate(one).values() for one in (found["by_class"], vector["by_class"])
        ]
        assert values[0].tolist() == pytest.approx(values[1].tolist(), rel=1e-6, abs=1e-9)
    else:
        assert found["losses"] == pytest.approx([vector["mean"]], rel=1e-15)


@pytest.mark.parametrize("vector", LOSSES["prompts"], ids=lambda vector: vector["name"])
def test_the_stdlib_client_reads_the_columns_of_the_vectors(vector: dict[str, Any]) -> None:
    module, run = loaded("stdlib_client.py"), json.loads(vector["run"])
    assert module.crc32(run["task"]) == run["task_crc32"]
    assert module.columns(run["task"]) == set(RunTask.model_validate(run).task.fields)


CHAT = {
    "chat": {"system": "{prompt}", "user": "{text}", "assistant": "It is"},
    "labels": {1: " yes", 0: " no"},
}


def calibrated(labels: int) -> RunSpec:
    """As the README's run: a search, with losses by class if allowed."""
    words = [" no", " yes", " maybe", " never", " so", " it"]
    return spec(
        task={
            "template": "{prompt} {text} {mask}",
            "labels": {index: words[index] for index in range(labels)},
        },
        method={"name": "thompson", "num_samples": 4, "batch_size": 3},
    )


@pytest.mark.parametrize(
    "run",
    [spec(), spec(task=CHAT), calibrated(3), calibrated(6)],
    ids=["plain", "chat", "few labels", "many"],
)
async def test_stdlib_client(tmp_path: Path, run: RunSpec) -> None:
    """No package at all, and the run is the same as an `EdgeClient` makes it."""
    module = ast.parse((EXAMPLES / "stdlib_client.py").read_text())
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    assert sum((node.end_lineno or 0) - node.lineno + 1 for node in functions) <= 140
    write(tmp_path / "rows.jsonl")
    async with (
        asyncio.timeout(60),
        LoopbackFederation(run, WORDS, backend=ScriptedBackend()) as served,
    ):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-I", "-S", "-W", "error::DeprecationWarning"),  # isolated: no site-packages
            EXAMPLES / "stdlib_client.py",
            served.url,
            "rows.jsonl",
            cwd=tmp_path,
            env={"FEDONE_TOKEN": served.token},
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        result = served.run.result()
    assert out.decode().splitlines()[:5] == [f"{number} 200" for number in range(5)]
    assert (result.status, result.rounds, result.spent.queries) == ("completed", 5, 20)
    async with LoopbackFederation(run, WORDS, backend=ScriptedBackend()) as served:
        async with served.client(ROWS) as client:
            await client.run_forever()
        assert served.run.result().alpha_sha256 == result.alpha_sha256
