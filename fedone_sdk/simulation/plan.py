"""What a run would cost, found without asking the model anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from fedone_sdk.aggregator import RoundMachine
from fedone_sdk.aggregator.events import Assigned, SeatsVacant, WorkAsked
from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.backends import LLMBackend
from fedone_sdk.budget import Account, Usage
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    Array,
    Cap,
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
)
from fedone_sdk.simulation.federation import Federation
from fedone_sdk.spec import RunSpec

__all__ = ["EvaluationPlan", "ExchangePlan", "RunPlan", "plan_run"]

Exchange = Literal["alpha", "losses"]
_EXCHANGES: tuple[Exchange, ...] = ("alpha", "losses")

_DRAWS = 32
"""Draws of prompts that the share of distinct ones is averaged over."""

_HEX = "0" * 32
_SHA256 = "0" * 64
_LOSS = math.log(2)
"""As long as any other float when it is written out."""


class EvaluationPlan(Message):
    """Queries of evaluation, if all its caps allow them.

    Attributes:
        no_prompt: For no prompt.
        before: For the untrained prompt.
        curve: For all points of the curve.
        after: For the tuned prompt.
        queries: All together.
    """

    no_prompt: int
    before: int
    curve: int
    after: int
    queries: int


class ExchangePlan(Message):
    """What all rounds put on the wire in one exchange.

    Attributes:
        federated: Enrolment, claims, assignments, updates, receipts; without empty polls.
        gateway: Scoring through the gateway.
    """

    federated: Traffic
    gateway: Traffic


class RunPlan(Message):
    """The plan of a run.

    Attributes:
        name: The run.
        cap: Its caps.
        clients: K.
        vocab_size: N as found.
        queries_per_round: K* x I x E.
        rounds: T as asked.
        rounds_affordable: Full rounds that the caps pay for, at worst case, T at most.
        training_queries: At most.
        distinct_share: Expected share of prompts that are not asked twice on one mini-batch.
        evaluation: Queries of evaluation.
        worst: The most that all of it may spend.
        expected_requests: Provider calls after equal ones were merged; training and evaluation.
        exchanges: Bytes in either exchange.
        sufficient: Whether the caps pay for all rounds at worst case.
        warnings: What deserves a second look.
    """

    name: str
    cap: Cap
    clients: int
    vocab_size: int
    queries_per_round: int
    rounds: int
    rounds_affordable: int
    training_queries: int
    distinct_share: float
    evaluation: EvaluationPlan
    worst: Usage
    expected_requests: int
    exchanges: dict[Exchange, ExchangePlan]
    sufficient: bool
    warnings: tuple[str, ...]


async def plan_run(federation: Federation, *, backend: LLMBackend) -> RunPlan:
    """Works out what a run would cost.

    Args:
        federation: The run and its data.
        backend: The model; only its label words and its worst cases are looked at.

    Raises:
        LabelWordError: A label word is not one token of the model.
        SpecError: The method's settings do not fit each other.
    """
    spec = federation.spec
    method, participation = spec.method, spec.participation
    await backend.check(spec.task.label_words)
    per_round = participation.clients_per_round * method.num_samples * method.local_steps
    query = backend.worst_case(method.batch_size)

    cap = spec.budget.queries if spec.budget else None
    training = spec.rounds * per_round if cap is None else min(cap, spec.rounds * per_round)
    # Rounds near the end go on with fewer prompts.
    evaluation = _evaluation(federation, rounds=math.ceil(training / per_round))
    held_out = (query * evaluation.queries).without_queries()
    account = Account(cap=spec.budget, spent=held_out)
    affordable = account.affordable(query * per_round, spec.rounds)
    share = _distinct_share(federation)
    return RunPlan(
        name=spec.name,
        cap=Cap.of(spec.budget),
        clients=len(federation.shards),
        vocab_size=len(federation.vocabulary),
        queries_per_round=per_round,
        rounds=spec.rounds,
        rounds_affordable=affordable,
        training_queries=training,
        distinct_share=round(share, 4),
        evaluation=evaluation,
        worst=query * training + held_out,
        expected_requests=math.ceil(training * share * query.requests)
        + evaluation.queries * query.requests,
        exchanges={
            exchange: _exchange(federation, exchange, training, model=backend.fingerprint)
            for exchange in _EXCHANGES
        },
        sufficient=affordable >= spec.rounds,
        warnings=tuple(_warnings(federation, per_round, affordable, evaluation)),
    )


def _evaluation(federation: Federation, *, rounds: int) -> EvaluationPlan:
    spec, size = federation.spec, federation.spec.method.batch_size
    if not federation.dev:
        return EvaluationPlan(no_prompt=0, before=0, curve=0, after=0, queries=0)
    whole = math.ceil(len(federation.dev) / size)
    every, examples = spec.evaluation.every, min(spec.evaluation.examples, len(federation.dev))
    curve = rounds // every * math.ceil(examples / size) if every else 0
    return EvaluationPlan(
        no_prompt=whole, before=whole, curve=curve, after=whole, queries=3 * whole + curve
    )


def _distinct_share(federation: Federation) -> float:
    """How many of the prompts that are drawn at a time differ, before anything was learnt.

    Later there are fewer: as alpha concentrates, more of them are equal.
    """
    machine = _machine(federation, federation.spec, "")
    state, count = machine.algorithm.init(), federation.spec.method.num_samples
    distinct = 0
    for draw in range(_DRAWS):
        rng = stream(stream_seed(federation.spec.seed, "plan", draw))
        indices = machine.algorithm.ask(state, rng, count).indices
        # By text: a blank candidate makes one text of several draws.
        distinct += len({federation.vocabulary.text(row) for row in indices.tolist()})
    return distinct / (_DRAWS * count)


def _machine(federation: Federation, spec: RunSpec, model: str) -> RoundMachine:
    try:
        return RoundMachine(
            spec.name,
            spec,
            vocab_size=len(federation.vocabulary),
            blank=federation.vocabulary.blank,
            gateway_model=model or None,
        )
    except ValueError as exc:
        raise SpecError(f"method: {exc}") from exc


def _exchange(
    federation: Federation, exchange: Exchange, queries: int, *, model: str
) -> ExchangePlan:
    """Weighs the messages of one assignment, made by the round machine itself, times their number.

    The gateway's are those of the client that is chosen first.
    """
    spec = federation.spec.model_copy(
        update={
            "participation": federation.spec.participation.model_copy(
                update={"exchange": exchange}
            ),
            "budget": None,  # what a message weighs does not hang on who pays for it
        }
    )
    machine = _machine(federation, spec, model)
    available = {index: len(shard) for index, shard in enumerate(federation.shards)}
    state, _ = machine.step(machine.start(), SeatsVacant(available=available), 0.0)
    client = state.seats[0].client
    _, effects = machine.step(state, WorkAsked(client=client, assignment_id=_HEX), 0.0)
    assignment = next(e.assignment for e in effects if isinstance(e, Assigned))
    shard = federation.shards[client]
    batch = [shard[row] for row in draw_minibatch(len(shard), spec.method.batch_size, 0)]

    claim = Claim(num_examples=len(shard))
    update = _update(assignment, len(shard), len(batch), model)
    receipt = Receipt(assignment_id=_HEX, round=0, body_sha256=_SHA256)
    score = Score(
        assignment_id=_HEX,
        prompts=_indices(federation) if exchange == "alpha" else None,
        examples=tuple({name: str(row[name]) for name in spec.task.fields} for row in batch),
    )
    shape = (spec.method.num_samples, len(batch), len(spec.task.labels))
    scores = Scores(log_probs=Array.pack([0] * math.prod(shape), shape, "float32"), model=model)

    times = math.ceil(queries / assignment.leased_queries)
    steps = len(assignment.steps) if isinstance(assignment, AlphaAssignment) else 1
    work = _traffic([claim, update], [assignment, receipt], times)
    joining = _joining(federation, times)
    return ExchangePlan(
        federated=Traffic(
            upload_bytes=work.upload_bytes + joining.upload_bytes,
            download_bytes=work.download_bytes + joining.download_bytes,
            messages=work.messages + joining.messages,
        ),
        gateway=_traffic([score], [scores], times * steps),
    )


def _joining(federation: Federation, assignments: int) -> Traffic:
    """What every client says once: it enrols, learns of the run, and at last of its end."""
    spec, count = federation.spec, len(federation.shards)
    enrolled = Enrolled(client_id="client-" + _HEX[:12], credential="fedone_" + _SHA256[:43])
    claim = Claim(num_examples=len(federation.shards[0]))
    ended = Problem.of(ProblemError("run_ended", "all runs that you could work for have ended"))
    task = RunTask(
        task=spec.task,
        method=spec.method,
        prompt_len=spec.prompt.length,
        vocab_size=len(federation.vocabulary),
        vocabulary_sha256=federation.vocabulary.sha256,
        gateway=True,
    )
    everybody = _traffic([Enrol(), claim], [enrolled, ended], count)
    # Only who is chosen asks what the task is: expected distinct clients of uniform draws.
    chosen = round(count * (1 - (1 - 1 / count) ** assignments))
    asking = _traffic([], [task], chosen)
    return Traffic(
        upload_bytes=everybody.upload_bytes + asking.upload_bytes,
        download_bytes=everybody.download_bytes + asking.download_bytes,
        messages=everybody.messages + asking.messages,
    )


def _update(
    assignment: AlphaAssignment | LossesAssignment, held: int, scored: int, model: str
) -> AlphaUpdate | LossesUpdate:
    counts, usage = Scored(scored=scored), Usage()
    if isinstance(assignment, AlphaAssignment):
        return AlphaUpdate(
            num_examples=held,
            scored=counts,
            usage=usage,
            model=model,
            alpha=assignment.alpha,
            mean_loss=_LOSS,
        )
    losses = (_LOSS,) * assignment.leased_queries
    return LossesUpdate(num_examples=held, scored=counts, usage=usage, model=model, losses=losses)


def _indices(federation: Federation) -> Array:
    shape = (federation.spec.method.num_samples, federation.spec.prompt.length)
    return Array.of_indices([0] * math.prod(shape), shape, len(federation.vocabulary))


def _traffic(up: Sequence[Message], down: Sequence[Message], times: int) -> Traffic:
    return Traffic(
        upload_bytes=sum(map(_size, up)) * times,
        download_bytes=sum(map(_size, down)) * times,
        messages=(len(up) + len(down)) * times,
    )


def _size(message: Message) -> int:
    return len(message.model_dump_json().encode())


def _warnings(
    federation: Federation, per_round: int, affordable: int, evaluation: EvaluationPlan
) -> list[str]:
    spec, found = federation.spec, []
    size, smallest = spec.method.batch_size, min(map(len, federation.shards))
    wanted = spec.prompt.vocabulary.size
    if spec.budget is None:
        found.append("budget: no cap is set")
    if not affordable:
        found.append(f"budget: cannot pay one round of {per_round} queries at worst case")
    elif affordable < spec.rounds:
        found.append(f"budget: pays {affordable} of {spec.rounds} rounds at worst case")
    limit = spec.evaluation.queries
    if limit is not None and limit < evaluation.queries:
        found.append(f"evaluation.queries: {limit} of {evaluation.queries} that it would take")
    if not federation.dev:
        found.append("data.dev: is missing, so nothing will be measured")
    if wanted is not None and len(federation.vocabulary) < wanted:
        found.append(
            f"prompt.vocabulary.size: {wanted} asked, only {len(federation.vocabulary)} found"
        )
    if federation.reused_rows:
        found.append("data: clients share rows, there are too few for disjoint shards")
    if smallest < size:
        found.append(
            f"method.batch_size: {size} asked, the smallest client holds {smallest} examples"
        )
    return found
