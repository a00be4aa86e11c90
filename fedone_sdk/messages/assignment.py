"""Work for one client in one round."""

from __future__ import annotations

import operator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from fedone_sdk.messages.array import Array, SharedMemory
from fedone_sdk.messages.base import MAX_MODEL_CHARS, Id, Message, Seed
from fedone_sdk.spec import CalibrationSpec, MethodSpec, PrivacySpec, RunName
from fedone_sdk.task import TaskSpec
from fedone_sdk.vocabulary import Layout, Slot, SlotName, Token, Vocabulary

__all__ = [
    "ASSIGNMENT",
    "AlphaAssignment",
    "Assignment",
    "Claim",
    "LossesAssignment",
    "Renewal",
    "RunTask",
    "Step",
    "VocabularyList",
]


class Claim(Message):
    """``POST /v1/assignments/claim``: a client asks for work.

    Attributes:
        num_examples: Examples that the client holds now.
        wait_s: How long the server may hold the request open, seconds.
        run_id: Only work for this run is wanted.
        own_model: Whether the client asks a model of its own, though the server may have one: what
            that spends the server does not see.
        model: Fingerprint of that model, where it is known. A run that scores with another one
            refuses the client before anything is spent.
        changed: Whether the client's data or settings may have changed since it last declined
            work as unfit: it may be offered such work again.
    """

    num_examples: Annotated[int, Field(ge=1, le=2**31)]
    wait_s: Annotated[float, Field(ge=0, le=60)] = 25.0
    run_id: RunName | None = None
    own_model: Annotated[bool, Field(exclude_if=operator.not_)] = False
    model: Annotated[
        str | None, Field(min_length=1, max_length=MAX_MODEL_CHARS, exclude_if=operator.not_)
    ] = None
    changed: Annotated[bool, Field(exclude_if=operator.not_)] = False


class Step(Message):
    """One local step.

    Attributes:
        num_samples: I, prompts to score; 0 where the client trains instead.
        minibatch_seed: Seeds the draw of the mini-batch (`fedone_sdk.data.draw_minibatch`).
        prompt_seed: Seeds ``ask`` (alpha exchange only).
    """

    num_samples: Annotated[int, Field(ge=0, le=65536)]
    minibatch_seed: Seed
    prompt_seed: Seed


_Version = Annotated[int, Field(ge=0, le=2**31)]
"""How many candidates were added since a run began: its vocabulary only ever grows."""


class _Assignment(Message):
    assignment_id: Id
    run_id: RunName
    round: Annotated[int, Field(ge=0)]
    deadline_s: Annotated[float, Field(gt=0)]
    leased_queries: Annotated[int, Field(ge=0)]
    vocabulary_version: _Version = Field(default=0, exclude_if=operator.not_)


class AlphaAssignment(_Assignment):
    """Work in the ``alpha`` exchange: run ask and tell for the steps, or train; return your alpha.

    Attributes:
        assignment_id: Names the work in every later call.
        run_id: The run.
        round: The round, from 0.
        deadline_s: Seconds from now until the seat is given to another client.
        leased_queries: Queries that are reserved for this work.
        vocabulary_version: Candidates that were added since the run began. A client that knows of
            fewer fetches the task again, and the candidates that it lacks.
        alpha: What is tuned, float32; for methods over tokens of shape (n, N), positive, and 0
            where a position has no such candidate.
        memory: What the method remembers beside alpha, where that belongs to the run.
        steps: One entry per local step.
    """

    exchange: Literal["alpha"] = "alpha"
    alpha: Array
    memory: SharedMemory = Field(default_factory=dict)
    steps: Annotated[tuple[Step, ...], Field(min_length=1, max_length=1024)]


class LossesAssignment(_Assignment):
    """Work in the ``losses`` exchange: score these prompts, return one loss each.

    Attributes:
        assignment_id: Names the work in every later call.
        run_id: The run.
        round: The round, from 0.
        deadline_s: Seconds from now until the seat is given to another client.
        leased_queries: Queries that are reserved for this work.
        vocabulary_version: As in an `AlphaAssignment`.
        prompts: Shape (I, n), candidate indices into the run's vocabulary; or (I, d), float32,
            vectors of a latent space.
        minibatch_seed: Seeds the draw of the mini-batch.
    """

    exchange: Literal["losses"] = "losses"
    prompts: Array
    minibatch_seed: Seed


Assignment = Annotated[AlphaAssignment | LossesAssignment, Field(discriminator="exchange")]
ASSIGNMENT: TypeAdapter[AlphaAssignment | LossesAssignment] = TypeAdapter(
    Assignment, config=ConfigDict(defer_build=True)
)


class Renewal(Message):
    """The answer to ``POST /v1/assignments/{id}/renew``.

    Older servers answer with the whole assignment, in which the same key stands.

    Attributes:
        deadline_s: Seconds from now until the seat is given to another client.
    """

    deadline_s: Annotated[float, Field(gt=0)]


class RunTask(Message):
    """``GET /v1/runs/{id}/task``: what a client must know of a run, fetched once.

    Attributes:
        task: Template, label words, loss.
        method: The method and its settings.
        prompt_len: n.
        vocab_size: N, the candidates of a position; 0 for methods without a vocabulary.
        blank: Index of the blank candidate, if all positions share one.
        layout: Of a prompt of slots, each slot's positions, number of candidates (at most N) and
            index of its blank candidate.
        vocabulary_sha256: Names the vocabulary; its texts are a separate resource.
        vocabulary_version: Candidates that were added since the run began.
        gateway: Whether the server scores prompts for clients (``POST /v1/score``).
        loss_clip: In the ``alpha`` exchange the client clips its mean losses to [0, `loss_clip`].
        privacy: What noise the client adds to what it returns.
        calibration: For ``labels``, the method is told losses by class and label bias, which in the
            ``losses`` exchange the client returns; the other kinds ask nothing of it.
    """

    task: TaskSpec
    method: MethodSpec
    prompt_len: int
    vocab_size: int
    blank: int | None = None
    layout: Layout = Field(default=(), exclude_if=operator.not_)
    vocabulary_sha256: str
    vocabulary_version: _Version = Field(default=0, exclude_if=operator.not_)
    gateway: bool
    loss_clip: float | None = None
    privacy: PrivacySpec | None = None
    calibration: CalibrationSpec = CalibrationSpec(kind="none")


class VocabularyList(Message):
    """``GET /v1/runs/{id}/vocabulary``: the candidates, in index order.

    With ``?after=VERSION`` only those that were added since that version.

    Attributes:
        candidates: Of every position; none where there are slots.
        slots: Candidates slot by slot, in the order of the prompt.
        appended: Slot and text of each candidate that was added after the version that was asked
            for.
        version: Candidates that were added since the run began.
    """

    candidates: tuple[str, ...] = ()
    slots: tuple[Slot, ...] = Field(default=(), exclude_if=operator.not_)
    appended: tuple[tuple[SlotName, Token], ...] = Field(default=(), exclude_if=operator.not_)
    version: _Version = Field(default=0, exclude_if=operator.not_)

    def vocabulary(self, known: Vocabulary | None = None) -> Vocabulary:
        """What it carries.

        Args:
            known: The vocabulary of the version that was asked for; None for none.

        Raises:
            ValueError: It is no vocabulary.
        """
        if known is None:
            return Vocabulary(candidates=self.candidates, slots=self.slots)
        return known.with_candidates(self.appended)
