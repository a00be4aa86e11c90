"""Counts of the messages and queries of a run with a scripted model."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from fedone_sdk.evaluation.engine import Result, Workspace
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.testing import ScriptedBackend

if TYPE_CHECKING:
    from fedone_sdk.client import Transport
    from fedone_sdk.messages import Claim, Receipt

_TASK = {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}}


class _Counted:
    """A transport to the aggregator that counts updates (``visits``) and their numbers of alpha.

    ``down`` are those of the updates' assignments, ``up`` those of the updates.
    """

    def __init__(self, line: Transport, tally: Counter[str]) -> None:
        self._line, self._tally = line, tally
        self._assigned: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)

    async def claim(self, credential: str, message: Claim) -> Any:
        work: Any = await self._line.claim(credential, message)
        if getattr(work, "exchange", None) == "alpha":
            self._assigned[work.assignment_id] = len(work.alpha.values())
        return work

    async def update(self, credential: str, assignment_id: str, message: Any) -> Receipt:
        receipt = await self._line.update(credential, assignment_id, message)
        self._tally["visits"] += 1
        self._tally["down"] += self._assigned.pop(assignment_id, 0)
        self._tally["up"] += len(message.alpha.values()) if message.exchange == "alpha" else 0
        return receipt


def count_messages(options: dict[str, Any], workspace: Workspace) -> Result:
    """Run a method's rounds with a scripted model, and count messages and queries.

    The clients, the round machine, the budget and the messages are those of any other run.

    Args:
        options: ``method`` as in a run, ``prompt_len``, ``vocab_size``, ``num_clients``,
            ``clients_per_round``, ``rounds`` and ``exchange``.
        workspace: Not used.

    Returns:
        ``visits`` (updates that the server took), ``elements_down`` and ``elements_up`` (numbers
        of alpha in all assignments and updates), ``queries`` (of the model, from the run's
        account), and ``communication`` as the run's result has it.
    """
    spec = validate_spec(RunSpec, _run(options), source="trial")
    clients = range(options["num_clients"])
    federation = Federation(
        spec=spec,
        shards=tuple(({"text": f"text {number}", "label": number % 2},) for number in clients),
        dev=(),
        vocabulary=spec.prompt.build(spec.task),
        reused_rows=False,
    )
    tally: Counter[str] = Counter()
    result = asyncio.run(
        simulate(
            federation,
            backend=ScriptedBackend(),
            transport="memory",
            between=lambda number, line: cast("Transport", _Counted(line, tally)),
        )
    )
    return {
        "status": result.status,
        "rounds": result.rounds,
        "visits": tally["visits"],
        "elements_down": tally["down"],
        "elements_up": tally["up"],
        "queries": result.spent.queries,
        "communication": result.communication.model_dump(mode="json"),
        "wall_s": result.wall_s,
    }


def _run(options: dict[str, Any]) -> dict[str, Any]:
    method = {"batch_size": 1, **options["method"]}
    words = [f" w{number}" for number in range(options["vocab_size"])]
    return {
        "name": "count",
        "task": _TASK,
        "prompt": {
            "length": options["prompt_len"],
            "vocabulary": {"kind": "list", "candidates": words},
        },
        "method": method,
        "participation": {
            "clients_per_round": options["clients_per_round"],
            "exchange": options["exchange"],
            "min_clients": options["num_clients"],
        },
        "rounds": options["rounds"],
        "evaluation": {"every": 0},
    }
