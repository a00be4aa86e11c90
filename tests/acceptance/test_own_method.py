"""A user-defined algorithm, named in RUN.yaml: tuned, served, resumed, refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Aggregator
from fedone_sdk.aggregator.config import ServeConfig
from fedone_sdk.algorithms import Space, State, check_algorithm, make_method, registry
from fedone_sdk.backends.build import build_backend
from fedone_sdk.errors import MethodError
from fedone_sdk.messages import RunResult
from fedone_sdk.stores import SqlStore
from tests.console import Fedone
from tests.integration.caller import ADMIN, TOKEN
from tests.integration.test_http import server, spec_of  # noqa: F401
from tests.runs import until

MODULE = """\
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedone_sdk.algorithms import Candidates, PlainAlgorithm, State

SEEN = []


@dataclass(frozen=True, kw_only=True)
class Climb(PlainAlgorithm):
    shares_memory: ClassVar[bool] = SHARES

    prompt_len: int
    vocab_size: int
    num_samples: int
    asks: int | None
    step: int = 1

    def __post_init__(self):
        SEEN.append((self.asks, self.step))

    @property
    def shape(self):
        return self.prompt_len, self.vocab_size

    def init(self):
        return State(
            alpha=np.full(self.shape, 1 / self.vocab_size), memory={"told": np.zeros(1)}
        )

    def check(self, state):
        if set(state.memory) - {"told"}:
            raise ValueError("a memory of another method")

    def project(self, alpha):
        return np.clip(np.asarray(alpha, dtype=np.float32), 0, 1)

    def prompt(self, state):
        return state.alpha.argmax(axis=1)

    def ask(self, state, rng, num_samples=None):
        prompts = np.tile(self.prompt(state), (num_samples or self.num_samples, 1))
        prompts[1:] = rng.integers(self.vocab_size, size=prompts[1:].shape)
        return Candidates(prompts=prompts, probabilities=state.alpha.astype(float))

    def tell(self, state, candidates, losses):
        best = candidates.prompts[int(np.argmin(losses))]
        alpha = np.eye(self.vocab_size)[best] * 0.5 + state.alpha * 0.5
        told = state.memory.get("told", np.zeros(1)) + self.step
        FAILS
        return State(alpha=alpha, memory={"told": told})


class NoMethod:
    pass


def raising(**given):
    raise RuntimeError("no licence")
"""
BACKEND = """\
import zlib

from fedone_sdk.testing import ScriptedBackend


class Model(ScriptedBackend):
    def __init__(self):
        super().__init__(lambda given, words: (-1.0, -1.0 - zlib.crc32(str(given).encode()) % 9))
"""
RUN = """\
name: climb
task: {template: "{text} It was{prompt} {mask}.", labels: {0: " bad", 1: " good"}}
data: {train: rows.jsonl, dev: dev.jsonl, num_clients: 2}
prompt: {length: 3, vocabulary: {kind: list, candidates: ["", " a", " b", " c"]}}
method:
  {name: own, object: "fedone_test_climb:Climb", options: {step: 2}, num_samples: 4, batch_size: 2}
participation: {exchange: losses, deadline_s: 2}
budget: {queries: 24}
rounds: 6
backend: {kind: own, object: "fedone_test_model:Model"}
"""
OBJECT = "fedone_test_climb:Climb"
NOT_LOADED = f"method.object: '{OBJECT}' was not loaded here"


def write_module(shares: bool = True, fails: str = "") -> None:
    text = MODULE.replace("SHARES", str(shares)).replace("FAILS", fails or "pass")
    Path("fedone_test_climb.py").write_text(text)
    forget()


def forget() -> None:
    """Forgets what was imported, as a new process does."""
    registry._loaded.clear()
    for name in ("fedone_test_climb", "fedone_test_model"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Without .pyc files: a module that is written again within a second is read again.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    for name, start in ("rows", 0), ("dev", 8):
        rows = (f'{{"text": "row {n}", "label": {n % 2}}}\n' for n in range(start, start + 8))
        Path(f"{name}.jsonl").write_text("".join(rows))
    Path("fedone_test_model.py").write_text(BACKEND)
    Path("run.yaml").write_text(RUN)
    write_module()
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    forget()


def tuned(fedone: Fedone, *arguments: str) -> RunResult:
    options = ("--json", "r.json", *arguments)
    code, _, err = fedone("tune", "run.yaml", *options)
    assert code == 0, err
    return RunResult.model_validate_json(Path("r.json").read_bytes())


class TestTuned:
    def test_a_corrected_method_starts_with_the_token_of_the_failed_start(
        self, fedone: Fedone, folder: Path
    ) -> None:
        module = Path("fedone_test_climb.py")
        right = module.read_text()
        module.write_text(right.replace("def ask(", "def query("))
        forget()
        for _ in range(2):
            code, _, err = fedone("tune", "run.yaml")
            assert code == 2
            assert "returns a Climb without ask" in err
        module.write_text(right)
        forget()
        code, _, err = fedone("tune", "run.yaml")
        assert code == 0
        assert "token" not in err
        assert "fedone report climb --store .fedone/climb.db --run run.yaml" in err

    @pytest.mark.parametrize("member", ["check", "project"])
    def test_check_and_project_have_defaults(
        self, fedone: Fedone, folder: Path, member: str
    ) -> None:
        module = Path("fedone_test_climb.py")
        module.write_text(module.read_text().replace(f"def {member}(", f"def not_{member}("))
        forget()
        assert tuned(fedone, "--no-store").status == "completed"

    @pytest.mark.parametrize("shares", [True, False], ids=["run's memory", "clients' memory"])
    def test_a_run_continues_from_its_stored_state(
        self, fedone: Fedone, folder: Path, shares: bool
    ) -> None:
        write_module(shares)
        straight = tuned(fedone, "--no-store")
        assert (straight.status, straight.rounds, straight.spent.queries) == ("completed", 6, 24)
        assert sys.modules["fedone_test_climb"].SEEN[0] == (6, 2)
        forget()
        Path("run.yaml").write_text(RUN.replace("queries: 24", "queries: 12"))
        assert tuned(fedone).rounds == 3
        forget()
        raised = tuned(fedone, "--raise", "queries=24")
        assert raised.alpha_sha256 == straight.alpha_sha256
        assert [line.mean_loss for line in raised.history] == [
            line.mean_loss for line in straight.history
        ]

    def test_what_is_stored_loads_only_what_a_file_here_names(
        self, fedone: Fedone, folder: Path
    ) -> None:
        tuned(fedone)
        for *command, done in (
            ("runs", "export", "climb", "-o", "c.jsonl", "run climb"),
            ("runs", "export", "climb", "--as", "prompt", "-o", "p.json", "prompt of run climb"),
            ("report", "climb", "-o", "c.html", "run climb"),
        ):
            forget()
            code, _, err = fedone(*command)
            assert (code, len(err.splitlines())) == (2, 1), command
            assert NOT_LOADED in err
            assert "fedone_test_climb" not in sys.modules
            code, out, err = fedone(*command, "--run", "run.yaml")
            assert (code, err) == (0, ""), command
            assert done in out

    def test_a_method_that_fails_ends_the_run_which_can_go_on(
        self, fedone: Fedone, folder: Path
    ) -> None:
        straight = tuned(fedone, "--no-store")
        write_module(fails="if told[0] > 6: raise RuntimeError('out of memory')")
        code, out, _ = fedone("tune", "run.yaml", "--json", "r.json")
        result = RunResult.model_validate_json(Path("r.json").read_bytes())
        assert (code, result.status, result.rounds) == (1, "failed", 3)
        reason = f"method {OBJECT}: tell raises RuntimeError: out of memory"
        assert result.reason == reason
        assert reason in out
        write_module()
        assert tuned(fedone).alpha_sha256 == straight.alpha_sha256


class TestServed:
    def config(self) -> ServeConfig:
        served = RUN.replace("data: {train: rows.jsonl, dev: dev.jsonl, num_clients: 2}\n", "")
        Path("run.yaml").write_text(served[: served.index("backend:")])
        Path("serve.yaml").write_text(
            f"store: fedone.db\nauth: {{enrolment_tokens: [{TOKEN}], admin_token: {ADMIN}}}\n"
            f"runs: [run.yaml]\n{RUN[RUN.index('backend:') :]}"
        )
        return ServeConfig.load("serve.yaml")

    async def serve(self, config: ServeConfig, rounds: int, port: int) -> RunResult:
        """Serves the configured run on the folder's store until it has done so many rounds."""
        assert config.backend is not None
        ((given,), _) = config.load_runs(Path())
        rows = [{"text": f"row {n}", "label": n % 2} for n in range(8)]
        store = SqlStore.sqlite("fedone.db")
        async with (
            build_backend(config.backend, Path()) as backend,
            Aggregator(backend=backend, store=store, enrolment_tokens=[TOKEN]) as aggregator,
        ):
            url = await aggregator.listen(port=port)
            run = await aggregator.service.add_run(given.spec, given.vocabulary)
            assert run.task.method.model_dump()["object"] is None
            assert run.task.method.model_dump()["options"] == {}
            client = EdgeClient(url, token=TOKEN, data=rows, state_dir="device")
            async with client:
                work = asyncio.create_task(client.run_forever())
                await until(lambda: run.state.round >= rounds)
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
            result = run.result()
        return result

    async def test_a_restarted_server_continues(self, folder: Path, unused_tcp_port: int) -> None:
        config = self.config()
        partial = await self.serve(config, 2, unused_tcp_port)
        assert partial.status == "running"
        forget()
        ended = await self.serve(config, 6, unused_tcp_port)
        assert (ended.status, ended.rounds) == ("completed", 6)
        assert ended.history[: partial.rounds] == partial.history

    async def test_an_update_outlives_the_method_s_failure(self, folder: Path) -> None:
        write_module(fails="if SEEN[-1] == 'broken': raise RuntimeError('out of memory')")
        config = self.config()
        assert config.backend is not None
        ((given,), _) = config.load_runs(Path())
        rows = [{"text": f"row {n}", "label": n % 2} for n in range(8)]
        seen = sys.modules["fedone_test_climb"].SEEN
        async with (
            build_backend(config.backend, Path()) as backend,
            Aggregator(backend=backend, enrolment_tokens=[TOKEN]) as aggregator,
        ):
            url = await aggregator.listen()
            run = await aggregator.service.add_run(given.spec, given.vocabulary)
            async with EdgeClient(url, token=TOKEN, data=rows, state_dir="device") as client:
                seen.append("broken")
                turn = await client.run_once()
                assert (turn.outcome, run.state.status) == ("refused", "failed")
                assert turn.reason == "run_conflict: the run has failed; its open work is kept"
                seen.append("mended")
                await aggregator.service.resume_run(run)
                assert (await client.run_once()).outcome == "worked"
                # The kept update, and one more round: nothing is asked twice.
                assert (run.state.round, run.state.account.spent.requests) == (2, 2 * 4)

    def test_check(self, fedone: Fedone, folder: Path) -> None:
        self.config()
        code, out, err = fedone("serve", "serve.yaml", "--check")
        assert (code, err) == (0, "")
        assert "would serve 1 run" in out
        Path("fedone_test_climb.py").unlink()
        forget()
        code, _, err = fedone("serve", "serve.yaml", "--check")
        assert (code, len(err.splitlines())) == (2, 1)
        assert err.startswith(f"run.yaml: method.object: cannot import '{OBJECT}'")

    async def test_a_stored_run_without_its_file_affects_no_other(self, folder: Path) -> None:
        await self.serve(self.config(), 1, 0)
        forget()
        with structlog.testing.capture_logs() as logs:
            async with Aggregator(
                store=SqlStore.sqlite("fedone.db"), enrolment_tokens=[TOKEN], admin_token=ADMIN
            ) as aggregator:
                url = await aggregator.listen()
                other = spec_of("other")
                await aggregator.add_run(other, other.prompt.build(other.task))
                import aiohttp

                async with (
                    aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as session,
                    session.get(f"{url}/v1/runs/climb") as response,
                ):
                    problem = await response.json()
        assert (response.status, problem["code"]) == (409, "run_conflict")
        assert NOT_LOADED in problem["detail"]
        assert "fedone_test_climb" not in sys.modules
        message = [line for line in logs if line["event"] == "a run cannot be read"]
        assert NOT_LOADED in message[0]["reason"]
        assert "traceback" not in message[0]


@pytest.mark.parametrize(
    ("was", "now", "said"),
    [
        (OBJECT, "fedone_test_climb:No", "method.object: cannot import"),
        (OBJECT, "fedone_test_climb:raising", "raising raises RuntimeError: no licence"),
        (f'object: "{OBJECT}", ', "", "method.object: is required for method own"),
        ("{step: 2}", "{stride: 2}", "Climb raises TypeError"),
        ("length: 3,", 'length: 3, start: [{" a": 0.5}, {"": 0.5}, {"": 0.5}],', "argument start"),
        (
            'prompt: {length: 3, vocabulary: {kind: list, candidates: ["", " a", " b", " c"]}}',
            "prompt: {slots: [{name: a, candidates: [a, b]}, {name: b, candidates: [a, b, c]}]}",
            "argument space",
        ),
    ],
)
def test_mistakes_are_one_line(fedone: Fedone, folder: Path, was: str, now: str, said: str) -> None:
    assert was in RUN
    Path("run.yaml").write_text(RUN.replace(was, now))
    code, _, err = fedone("tune", "run.yaml")
    assert (code, len(err.splitlines())) == (2, 1), err
    assert said in err


class TestContract:
    """`check_algorithm` by a method of the SDK with one flaw each."""

    SPACE = Space.repeated(3, 4)

    def made(self, **flaws: Any) -> Any:
        method = make_method("gs-bdpl", space=self.SPACE, num_samples=4, seed=0)

        class Flawed:
            def __getattr__(self, name: str) -> Any:
                found = flaws.get(name, getattr(method, name))
                if found is AttributeError:
                    raise AttributeError(name)
                return found

        return Flawed()

    @pytest.mark.parametrize(
        ("flaw", "said"),
        [
            ({"tell": AttributeError}, "without tell"),
            ({"shape": (4, 3)}, r"shape: must be \(3, 4\)"),
            ({"init": lambda: State(alpha=np.ones((2, 4)))}, "init: alpha must be of shape"),
            ({"init": lambda: State(alpha=-np.ones((3, 4)))}, "init: alpha must not be negative"),
            ({"project": lambda alpha: np.asarray(alpha) / 2}, "project: changes the alpha"),
            ({"ask": lambda *_: np.ones((4, 3))}, "ask: must return Candidates"),
            ({"wanted": lambda state: 1}, r"wanted: must lie in \[2, 4\]"),
        ],
    )
    def test_a_flaw_is_named(self, flaw: dict[str, Any], said: str) -> None:
        with pytest.raises(MethodError, match=said):
            check_algorithm(self.made(**flaw), space=self.SPACE, num_samples=4)

    def test_what_changes_from_call_to_call_is_refused(self) -> None:
        method = make_method("random", space=self.SPACE, num_samples=4, seed=0)
        rng = np.random.default_rng()
        flawed = self.made(ask=lambda state, _, count=None: method.ask(state, rng, count))
        with pytest.raises(MethodError, match="ask: gives other prompts for the same state"):
            check_algorithm(flawed, space=self.SPACE, num_samples=4)
