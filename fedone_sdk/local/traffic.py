"""The first assignment of a planned run, and the traffic by the sizes of its messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.aggregator import RoundMachine
from fedone_sdk.aggregator.rounds.events import Assigned, SeatsVacant, WorkRequested
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.algorithms import ClassLosses, stream, stream_seed
from fedone_sdk.budget import Usage
from fedone_sdk.client.scoring import cuts
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.local.federation import Federation
from fedone_sdk.messages import (
    TENSORS,
    AlphaAssignment,
    AlphaUpdate,
    Array,
    Claim,
    Enrol,
    Enrolled,
    LossesAssignment,
    LossesUpdate,
    Message,
    Problem,
    Receipt,
    RunTask,
    Score,
    Scored,
    Scores,
    Traffic,
    encode,
)
from fedone_sdk.messages.ndarray import memory_to_wire, prompts_to_wire
from fedone_sdk.spec import RunSpec
from fedone_sdk.task import references_of

_STEPS = 4
"""Steps before a method's memory is measured; a pool is nearly full by then."""

_CHARS_PER_TOKEN = 4
"""Characters of English text, to estimate gateway traffic when the model writes text."""

_SHA256 = "0" * 64
_LOSS = math.log(2)
"""A float with the usual number of digits."""


Exchange = Literal["alpha", "losses"]

WORK_ID = "0" * 32
"""A placeholder with the usual length."""


def unbudgeted(spec: RunSpec, exchange: Exchange) -> RunSpec:
    """Return the run with one client per round and no budget, for its first assignment."""
    participation = {"exchange": exchange, "min_clients": 1}
    return spec.model_copy(
        update={
            "participation": spec.participation.model_copy(update=participation),
            "budget": None,
        }
    )


def first_work(
    federation: Federation, machine: RoundMachine, round_number: int
) -> tuple[RunState, AlphaAssignment | LossesAssignment]:
    """Return the assignment of the first client that a round selects, from the round machine."""
    available = {index: len(shard) for index, shard in enumerate(federation.shards)}
    state = replace(machine.initial_state(), round=round_number)
    state, _ = machine.step(state, SeatsVacant(available=available), 0.0)
    asked = WorkRequested(client=state.seats[0].client, assignment_id=WORK_ID)
    state, effects = machine.step(state, asked, 0.0)
    return state, next(e.assignment for e in effects if isinstance(e, Assigned))


def planned_machine(federation: Federation, spec: RunSpec, model: str) -> RoundMachine:
    """Return the round machine of a planned run.

    Raises:
        SpecError: The method's settings do not fit each other.
    """
    try:
        return RoundMachine.of(spec.name, spec, federation.vocabulary, gateway_model=model or None)
    except ValueError as exc:
        raise SpecError(f"method: {exc}") from exc


class ExchangePlan(Message):
    """Bytes of all rounds in one exchange.

    Attributes:
        federated: Enrolment, claims, assignments, updates, receipts; without empty polls.
        gateway: Scoring through the gateway.
    """

    federated: Traffic
    gateway: Traffic


def exchange_plan(
    federation: Federation, exchange: Exchange, queries: int, *, model: str
) -> ExchangePlan:
    """Return the sizes of one assignment's messages, from the round machine, times their number.

    Gateway messages are those of the first selected client.
    """
    spec = unbudgeted(federation.spec, exchange)
    machine = planned_machine(federation, spec, model)
    state, assignment = first_work(federation, machine, 0)
    if isinstance(assignment, AlphaAssignment):
        assignment = assignment.model_copy(update={"memory": _memory(machine)})
    client = state.seats[0].client
    shard = federation.shards[client]
    batch = [shard[row] for row in draw_minibatch(len(shard), spec.method.batch_size, 0)]

    claim = Claim(num_examples=len(shard))
    update = _update(machine, assignment, len(shard), len(batch), model)
    receipt = Receipt(assignment_id=WORK_ID, round=0, body_sha256=_SHA256)
    parts = [len(part) for part in cuts(spec.method.num_samples, len(batch))]
    explicit = exchange == "alpha" or len(parts) > 1
    score = [
        Score(
            assignment_id=WORK_ID,
            prompts=_indices(federation, num_prompts) if explicit else None,
            examples=tuple({name: str(row[name]) for name in spec.task.fields} for row in batch),
            references=references_of(spec.task, batch),
        )
        for num_prompts in parts
    ]
    scores = [_scores(federation, num_prompts, len(batch), model) for num_prompts in parts]

    times = math.ceil(queries / assignment.leased_queries)
    steps = len(assignment.steps) if isinstance(assignment, AlphaAssignment) else 1
    work = _traffic([claim, update], [assignment, receipt], times)
    return ExchangePlan(
        federated=_sum(work, _joining(federation, times)),
        gateway=_traffic(score, scores, times * steps),
    )


def _memory(machine: RoundMachine) -> dict[str, Array]:
    """Return the memory that is sent with alpha after some steps."""
    algorithm = machine.method
    state = algorithm.init()
    if not algorithm.shares_memory:
        return {}
    for step in range(min(_STEPS, machine.spec.rounds)):
        asked = algorithm.ask(state, stream(stream_seed(machine.spec.seed, "plan", step)))
        state = algorithm.tell(state, asked, _some_losses(machine, len(asked.prompts)))
    return memory_to_wire(state.memory)


def _some_losses(machine: RoundMachine, count: int) -> NDArray[np.float64] | ClassLosses:
    """Return losses of `count` prompts, in the form that the method takes."""
    losses = np.arange(count, dtype=np.float64)
    if machine.biases is None:
        return losses
    num_labels = len(machine.biases[0])
    means = np.broadcast_to(losses[:, None, None], (count, num_labels, len(machine.biases)))
    return ClassLosses(means=means, counts=np.ones(num_labels, dtype=np.int64))


def _scores(federation: Federation, num_prompts: int, batch_size: int, model: str) -> Scores:
    task = federation.spec.task
    if task.loss == "score":
        # Their lengths are unknown; these are the longest.
        text = " " * (task.max_tokens * _CHARS_PER_TOKEN)
        return Scores(texts=((text,) * batch_size,) * num_prompts, model=model)
    shape = (num_prompts, batch_size, max(len(task.labels), 1))
    return Scores(log_probs=Array.pack([0] * math.prod(shape), shape, "float32"), model=model)


def _joining(federation: Federation, assignments: int) -> Traffic:
    """Return the messages that each client exchanges once: enrolment, the task, the run's end."""
    spec, count = federation.spec, len(federation.shards)
    enrolled = Enrolled(client_id="client-" + WORK_ID[:12], credential="fedone_" + _SHA256[:43])
    claim = Claim(num_examples=len(federation.shards[0]))
    ended = Problem.of(ProblemError("run_ended", "all runs that you could work for have ended"))
    task = RunTask(
        task=spec.task,
        method=spec.method,
        prompt_len=spec.prompt.length,
        vocab_size=len(federation.vocabulary),
        vocabulary_sha256=federation.vocabulary.sha256,
        gateway=True,
        calibration=spec.calibration,
    )
    all_clients = _traffic([Enrol(nonce=_SHA256[:43]), claim], [enrolled, ended], count)
    # Only selected clients fetch the task: the expected distinct clients of uniform draws.
    chosen = round(count * (1 - (1 - 1 / count) ** assignments))
    return _sum(all_clients, _traffic([], [task], chosen))


def _update(
    machine: RoundMachine,
    assignment: AlphaAssignment | LossesAssignment,
    held: int,
    scored: int,
    model: str,
) -> AlphaUpdate | LossesUpdate:
    counts, usage = Scored(scored=scored), Usage()
    if isinstance(assignment, AlphaAssignment):
        return AlphaUpdate(
            num_examples=held,
            scored=counts,
            usage=usage,
            model=model,
            alpha=assignment.alpha,
            memory=assignment.memory,
            mean_loss=_LOSS,
        )
    losses = (_LOSS,) * assignment.leased_queries
    plain = LossesUpdate(num_examples=held, scored=counts, usage=usage, model=model, losses=losses)
    if machine.biases is None:
        return plain
    shape = (len(losses), len(machine.biases[0]), len(machine.biases))
    by_class = Array.pack([_LOSS] * math.prod(shape), shape, "float32")
    class_counts = (scored, *[0] * (shape[1] - 1))
    return plain.model_copy(update={"by_class": by_class, "class_counts": class_counts})


def _indices(federation: Federation, num_prompts: int) -> Array:
    prompts = np.zeros((num_prompts, federation.spec.prompt.length), np.int64)
    return prompts_to_wire(prompts, len(federation.vocabulary))


def _traffic(up: Sequence[Message], down: Sequence[Message], times: int) -> Traffic:
    return Traffic(
        upload_bytes=sum(map(_size, up)) * times,
        download_bytes=sum(map(_size, down)) * times,
        messages=(len(up) + len(down)) * times,
    )


def _sum(*parts: Traffic) -> Traffic:
    return Traffic(
        upload_bytes=sum(part.upload_bytes for part in parts),
        download_bytes=sum(part.download_bytes for part in parts),
        messages=sum(part.messages for part in parts),
    )


def _size(message: Message) -> int:
    return len(encode(message, TENSORS).content)
