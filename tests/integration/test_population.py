"""Clients of the memory transport exist only while they have work; the run is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.backends import Query
from fedone_sdk.budget import Budget, Usage
from fedone_sdk.client import EdgeClient, Transport
from fedone_sdk.clock import SystemClock
from fedone_sdk.errors import ProblemError, TransportError
from fedone_sdk.local import Federation, simulate
from fedone_sdk.local.population import Between, Population
from fedone_sdk.messages import Claim, RunResult
from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.runs import PROMPT, run_spec
from tests.virtual_time import VirtualTime, on_virtual_time

WORDS = Vocabulary(candidates=tuple(f" word{n}" for n in range(12)))
CLIENTS = 30


def federation_of(
    *, clients: int = CLIENTS, rounds: int = 8, local_steps: int = 1, **participation: Any
) -> Federation:
    spec = run_spec(
        data={"train": "train.jsonl", "num_clients": clients},
        prompt={**PROMPT, "length": 3},
        method={
            "batch_size": 2,
            "optimizer": "adamw",
            "learning_rate": 0.1,
            "local_steps": local_steps,
        },
        participation={"exchange": "alpha", "own_models": "trusted", **participation},
        rounds=rounds,
    )
    shards = tuple(
        tuple({"text": f"text {k} {n}", "label": (k + n) % 2} for n in range(3))
        for k in range(clients)
    )
    return Federation(spec=spec, shards=shards, dev=(), vocabulary=WORDS, reused_rows=False)


@dataclass
class Seen:
    """Enrolment indices of each round, why seats were lost, and most tasks of the loop at once."""

    chosen: list[tuple[int, ...]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    most_tasks: int = 0

    def __call__(self, run: ServedRun, change: Change | None) -> None:
        if change is None:
            return
        self.lost += [one.reason for one in change.closed if one.receipt is None]
        if change.finished is not None:
            self.chosen.append(change.finished.clients)
            self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))


async def run(federation: Federation, *, between: Between | None = None) -> tuple[RunResult, Seen]:
    seen = Seen()
    backend = ScriptedBackend()
    return await simulate(federation, backend=backend, between=between, watch=seen), seen


async def run_over_http(federation: Federation) -> tuple[RunResult, Seen]:
    seen = Seen()
    async with (
        LoopbackFederation(
            federation.spec, federation.vocabulary, backend=ScriptedBackend()
        ) as served,
        AsyncExitStack() as stack,
    ):
        served.aggregator.service.listeners.append(seen)
        enter = stack.enter_async_context
        clients = [await enter(served.client(shard)) for shard in federation.shards]
        for client in clients:
            await client.enrol()
        await asyncio.gather(*(client.run_forever() for client in clients))
        return served.run.result(), seen


def story(result: RunResult, seen: Seen) -> tuple[object, ...]:
    """What two runs have in common that are the same."""
    rounds = [(one.round, one.queries, one.mean_loss) for one in result.history]
    return result.alpha_sha256, result.prompt, result.spent, rounds, seen.chosen


@pytest.mark.parametrize("clients_per_round", [1, 10])
@pytest.mark.parametrize(
    ("exchange", "local_steps"), [("alpha", 1), ("alpha", 3), ("losses", 1), ("losses", 3)]
)
async def test_the_same_run_over_http(
    exchange: str, local_steps: int, clients_per_round: int
) -> None:
    federation = federation_of(
        exchange=exchange, local_steps=local_steps, clients_per_round=clients_per_round
    )
    http = await run_over_http(federation)
    memory = await run(federation)
    assert http[0].status == "completed"
    assert story(*memory) == story(*http)
    # Each sits more than once, with what its method remembers.
    if clients_per_round == 10:
        assert len({one for round_ in memory[1].chosen for one in round_}) < 8 * 10
    assert memory[0].gateway.messages == http[0].gateway.messages


@pytest.mark.parametrize("exchange", ["alpha", "losses"])
async def test_equal_requests_of_an_assignment(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that has converged asks for one prompt, here in requests of one prompt each."""
    monkeypatch.setattr("fedone_sdk.client.work._PAIRS", 1)
    federation = federation_of(clients=1, local_steps=2, exchange=exchange, own_models=None)
    spec = federation.spec
    prompt = spec.prompt.model_copy(update={"start": ({" word0": 1.0},) * 3})
    queries = spec.rounds * 2 * spec.method.num_samples
    spec = spec.model_copy(update={"prompt": prompt, "budget": Budget(queries=queries)})
    result, seen = await run(replace(federation, spec=spec))
    assert (result.status, result.rounds, seen.lost) == ("completed", spec.rounds, [])
    assert result.spent.queries == queries


async def test_clients_without_work_are_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = Population.create_client

    def counted(self: Population, member: Any) -> EdgeClient:
        made.append(member.number)
        return make(self, member)

    monkeypatch.setattr(Population, "create_client", counted)
    result, seen = await run(federation_of(clients=2000, rounds=6))
    chosen = {client for (client,) in seen.chosen}
    assert sorted(made) == sorted(chosen)
    assert seen.most_tasks < 20
    # All enrol; who works asks, gets, returns and is thanked, and asks once for the task.
    assert result.communication.messages == 2 * 2000 + 4 * 6 + len(chosen)


class Line:
    """What stands between a client and the aggregator; passes everything on."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Broken(Line):
    """A line that fails a number of times at one kind of request."""

    def __init__(self, inner: Transport, *, call: str, times: int) -> None:
        super().__init__(inner)
        self.left = times
        setattr(self, call, self._failing(call))

    def _failing(self, call: str) -> Callable[..., Awaitable[Any]]:
        async def asked(*args: Any) -> Any:
            if self.left:
                self.left -= 1
                raise TransportError("cannot be reached")
            return await getattr(self.inner, call)(*args)

        return asked


def _as(line: Line) -> Transport:
    return line  # type: ignore[return-value]


def clock_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the aggregator's deadlines jump with the loop."""

    def now(self: SystemClock) -> float:
        return 1e9 + asyncio.get_running_loop().time()

    monkeypatch.setattr(SystemClock, "now", now)


class TestFaults:
    @pytest.mark.parametrize("call", ["enrol", "task", "score", "update"])
    @on_virtual_time
    async def test_a_line_that_breaks_and_comes_back(
        self, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is lost: the work is done, or handed in, when the line is back."""
        clock_of_the_loop(monkeypatch)
        federation = federation_of(clients=6, exchange="alpha")
        undisturbed = await run(federation)
        # Not more at enrolment: who cannot enrol at the start ends the simulation.
        times = 3 if call == "enrol" else 7
        lines: list[Broken] = []

        def between(number: int, plain: Transport) -> Transport:
            lines.append(Broken(plain, call=call, times=times))
            return _as(lines[-1])

        disturbed = await run(federation, between=between)
        assert story(*disturbed) == story(*undisturbed)
        assert {line.left for line in lines} <= {0, times}
        assert any(line.left == 0 for line in lines)

    @on_virtual_time
    async def test_an_error_of_a_client_ends_the_simulation(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock_of_the_loop(monkeypatch)

        class Refused(Line):
            async def claim(self, credential: str, message: Claim) -> Any:
                raise ProblemError("forbidden", "not you")

        with pytest.raises(ExceptionGroup) as caught:
            await run(federation_of(clients=3), between=lambda number, plain: _as(Refused(plain)))
        assert caught.group_contains(ProblemError, match="not you")

    @on_virtual_time
    async def test_all_still_wait_after_hours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pool drops clients without requests: a population renews its membership."""
        clock_of_the_loop(monkeypatch)
        federation = federation_of(rounds=6, deadline_s=86_400)
        quick, slow = await run(federation), Seen()

        async def long(query: object) -> None:
            await asyncio.sleep(3600)

        result = await simulate(federation, backend=ScriptedBackend(gate=long), watch=slow)
        assert story(result, slow) == story(*quick)
        assert isinstance(asyncio.get_running_loop(), VirtualTime)
        assert asyncio.get_running_loop().time() > 6 * 3600


async def test_a_stop_during_queries_costs_their_cost() -> None:
    stop = asyncio.Event()

    class Dear(ScriptedBackend):
        """Each question might cost ten times what it does."""

        def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
            return super().worst_case(10 * batch_size, max_tokens)

    async def gate(query: Query) -> None:
        if len(backend.asked) > 4:
            stop.set()
            await asyncio.sleep(0.1)

    backend = Dear(gate=gate)
    federation = federation_of(exchange="losses")
    result = await simulate(federation, backend=backend, stop=stop)
    assert result.status == "stopped"
    # The first round's, and the second's, which were under way and count.
    assert (result.rounds, result.spent.queries, len(backend.asked)) == (2, 8, 8)
    assert result.spent.prompt_tokens == sum(len(query.inputs) for query in backend.asked)
