"""Claims, assignments, and the task of a run."""

from __future__ import annotations

import operator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedone_sdk.messages.base import Id, Message, Seed, is_none
from fedone_sdk.messages.tensor import Tensor
from fedone_sdk.spec import CalibrationSpec, MethodSpec, PrivacySpec, RunName
from fedone_sdk.task import TaskSpec
from fedone_sdk.vocabulary import Layout, Slot, SlotName, Token, Vocabulary


class Claim(Message):
    """``POST /v1/assignments/claim``: a client claims work.

    Attributes:
        wait_s: Maximal time for which the server may hold the request, seconds.
        run_id: The only run to work for; null is any.
        own_model: Whether the client queries a model of its own, even if the server has one.
        changed: Whether the client's data or settings may have changed since it declined a run's
            work as unfit. If so, it can get work of this run again.
    """

    num_examples: Annotated[int, Field(ge=1, le=2**31)]
    wait_s: Annotated[float, Field(ge=0, le=60)] = 25.0
    run_id: RunName | None = None
    own_model: Annotated[bool, Field(exclude_if=operator.not_)] = False
    changed: Annotated[bool, Field(exclude_if=operator.not_)] = False


class Step(Message):
    """One local step of the ``alpha`` exchange: draw prompts, score them, and change alpha.

    Attributes:
        num_samples: I, number of prompts to score.
        minibatch_seed: Seed for the draw of the mini-batch (`fedone_sdk.data.draw_minibatch`).
        prompt_seed: Seed for the method's ``ask``, which draws the prompts.
    """

    num_samples: Annotated[int, Field(ge=2, le=65536)]
    minibatch_seed: Seed
    prompt_seed: Seed


_Version = Annotated[int, Field(ge=0, le=2**31)]
"""Number of candidates that were added since the run started; a vocabulary only grows."""


class _Assignment(Message):
    assignment_id: Id
    run_id: RunName
    round: Annotated[int, Field(ge=0)]
    deadline_s: Annotated[float, Field(gt=0)]
    leased_queries: Annotated[int, Field(ge=0)]
    vocabulary_version: _Version = Field(default=0, exclude_if=operator.not_)


class AlphaAssignment(_Assignment):
    """Work in the ``alpha`` exchange: run the local steps and return the new alpha.

    Attributes:
        deadline_s: Seconds until the server gives the work to another client.
        leased_queries: Number of queries reserved for this work.
        vocabulary_version: Number of candidates added since the run started. A client with an older
            version fetches the task and the missing candidates.
        alpha: Parameters of the distribution over prompts: float32, shape (n, N) for n positions
            with up to N candidates; positive, or 0 for candidates that a position does not have.
    """

    exchange: Literal["alpha"] = "alpha"
    alpha: Tensor
    steps: Annotated[tuple[Step, ...], Field(min_length=1, max_length=1024)]


class LossesAssignment(_Assignment):
    """Work in the ``losses`` exchange: score prompts and return one loss for each prompt.

    Attributes:
        prompts: The prompts to score, shape (I, n): candidate indices at the n positions.
        biases: With label calibration, the biases of the C labels for each prompt, float32, shape
            (I, C). They are added to the label words' log-probabilities, nats.
        reflect: Whether the client may propose a candidate. If so, one of the reserved queries is
            for scoring this candidate.
    """

    exchange: Literal["losses"] = "losses"
    prompts: Tensor
    biases: Tensor | None = Field(default=None, exclude_if=is_none)
    minibatch_seed: Seed
    reflect: Annotated[bool, Field(exclude_if=operator.not_)] = False


Assignment = Annotated[
    AlphaAssignment | LossesAssignment, Field(discriminator="exchange", title="Assignment")
]


class Renewal(Message):
    """Response to ``POST /v1/assignments/{id}/renew``: the new deadline, in seconds from now."""

    deadline_s: Annotated[float, Field(gt=0)]


class Reflection(Message):
    """How devices propose new candidates, which a model writes from their rows.

    Attributes:
        slot: The slot that the candidates are for.
        gateway: Whether the run's model writes the candidates (``POST /v1/reflect``).
    """

    slot: SlotName
    gateway: bool


class RunTask(Message):
    """``GET /v1/runs/{id}/task``: description of a run for clients, fetched once.

    Attributes:
        prompt_len: n, number of positions of a prompt.
        vocab_size: N, largest number of candidates of a position.
        blank: Index of the blank, the empty candidate, if it is the same at all positions.
        layout: For a prompt of slots: for each slot, the number of positions, the number of
            candidates (at most N), and the index of the blank.
        task_crc32: `TaskSpec.crc32`; a client that computes another number declines the work.
        vocabulary_sha256: Digest of the vocabulary, which is fetched separately.
        gateway: Whether the server scores prompts for clients (``POST /v1/score``).
        model: Fingerprint of the run's model. A client whose own model has another fingerprint
            declines the work as unfit.
        loss_clip: In the ``alpha`` exchange the client clips its mean losses to [0, `loss_clip`].
        calibration: If the kind is ``labels``, updates of the ``losses`` exchange also contain
            `LossesUpdate.by_class`. Other kinds do not affect the client.
        reflection: How devices propose candidates; null if they may not.
    """

    task: TaskSpec
    task_crc32: Annotated[int, Field(ge=0, lt=2**32)]
    method: MethodSpec
    prompt_len: int
    vocab_size: int
    blank: int | None = None
    layout: Layout = Field(default=(), exclude_if=operator.not_)
    vocabulary_sha256: str
    vocabulary_version: _Version = Field(default=0, exclude_if=operator.not_)
    gateway: bool
    model: str | None = None
    loss_clip: float | None = None
    privacy: PrivacySpec | None = None
    calibration: CalibrationSpec = CalibrationSpec(kind="none")
    reflection: Reflection | None = Field(default=None, exclude_if=is_none)

    @model_validator(mode="after")
    def _check_reading(self) -> Self:
        if self.task_crc32 != self.task.crc32:
            raise ValueError(f"task_crc32: must be {self.task.crc32}, the CRC-32 of `task`")
        return self


class VocabularyList(Message):
    """``GET /v1/runs/{id}/vocabulary``: the candidates, in index order.

    With ``?after=VERSION`` it has only the candidates added after that version.

    Attributes:
        candidates: Candidates of every position; empty for prompts of slots.
        slots: Candidates per slot, in the order of the prompt.
        appended: Slot and text of each candidate added after the requested version.
        version: Number of candidates added since the run started.
    """

    candidates: tuple[str, ...] = ()
    slots: tuple[Slot, ...] = Field(default=(), exclude_if=operator.not_)
    appended: tuple[tuple[SlotName, Token], ...] = Field(default=(), exclude_if=operator.not_)
    version: _Version = Field(default=0, exclude_if=operator.not_)

    def vocabulary(self, known: Vocabulary | None = None) -> Vocabulary:
        """Return the vocabulary of the message.

        Args:
            known: The vocabulary of the version ``after``; None if the request had no ``after``.

        Raises:
            ValueError: The message is not a valid vocabulary.
        """
        if known is None:
            return Vocabulary(candidates=self.candidates, slots=self.slots)
        return known.with_candidates(self.appended)
