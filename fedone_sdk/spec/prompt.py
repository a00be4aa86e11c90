"""The tuned prompt and its candidates, in RUN.yaml."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, model_validator

from fedone_sdk.candidates import demonstrations, instructions, label_sets
from fedone_sdk.data import load_examples
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.imports import load_object
from fedone_sdk.spec.backends import WriterSpec
from fedone_sdk.spec.base import Spec
from fedone_sdk.task import Description, TaskSpec
from fedone_sdk.vocabulary import (
    LABELS,
    ListVocabulary,
    Slot,
    SlotName,
    Token,
    Vocabulary,
    VocabularySpec,
    build_vocabulary,
)

Shares = Annotated[dict[Token, Annotated[float, Field(gt=0, le=1)]], Field(max_length=256)]
"""Probabilities of candidates at one position."""

Start = tuple[tuple[tuple[int, float], ...], ...]
"""For each position, pairs of a candidate's index and its probability at the start of the run."""

_ROUNDING = 1e-6


def _from_short_form(value: object) -> object:
    """Expand a list of texts, or the name of a kind."""
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, (list, tuple)):
        return {"kind": "list", "candidates": list(value)}
    return value


class OwnSource(Spec):
    """Your own function, which returns the candidates.

    Attributes:
        object: ``package.module:function`` (the module may be next to the run file), or the name
            of an entry point of ``fedone.candidates``. The function is called with ``task``,
            ``texts`` (the training texts, if the run reads them) and the options.
        options: Further keyword arguments of `object`.
    """

    kind: Literal["own"] = "own"
    object: Annotated[str, Field(min_length=1, max_length=200)]
    options: dict[str, JsonValue] = Field(default_factory=dict)


CandidatesSpec = Annotated[
    Annotated[
        VocabularySpec
        | instructions.InstructionsSource
        | demonstrations.DemonstrationsSource
        | label_sets.LabelsSource
        | OwnSource,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_from_short_form),
]
"""Source of a slot's candidates."""


class SlotSpec(Spec):
    """A part of the prompt with its own candidates.

    Attributes:
        name: The slot's name in the task's templates; ``labels`` is reserved for the label words,
            which are not in templates.
        candidates: Source of the slot's candidates: a kind, or a list of texts.
        repeat: Number of positions of the slot; the candidates chosen for them are concatenated.
    """

    name: SlotName
    candidates: CandidatesSpec
    repeat: Annotated[int, Field(ge=1, le=1000)] = 1

    @model_validator(mode="before")
    @classmethod
    def _list_of_label_sets(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("name") == LABELS:
            sets = value.get("candidates")
            if isinstance(sets, (list, tuple)):
                return {**value, "candidates": {"kind": "labels", "sets": sets}}
        return value

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.name in ("prompt", "mask"):
            raise ValueError("name: must not be prompt or mask")
        if (self.name == LABELS) is not isinstance(self.candidates, label_sets.LabelsSource):
            raise ValueError("candidates.kind: must be 'labels' in slot 'labels', and only there")
        if self.name == LABELS and self.repeat > 1:
            raise ValueError("repeat: must be 1 in slot 'labels'")
        return self


class ProposerSpec(Spec):
    """A model that writes new candidates for a slot during the run.

    With ``scores`` the server's model reads the task's description and templates, the label names,
    and the best and worst candidates with their mean losses. It reads no device's text.

    With ``reflection`` a model reads rows of a device and the answers to them, if the device allows
    this (`WorkPolicy.reflect`). If the model's new candidate has a lower loss on these rows, the
    device sends it to the server. The model is on the device, or it is `backend`; the gateway then
    sees the rows and labels. `backend` also merges the best candidates of different clients
    (`merge_every`).

    Attributes:
        backend: A model that generates text; the run's budget pays for it. With ``reflection`` it
            may be null: then only models on devices write candidates.
        slot: The slot that the model writes for. Null is the first slot with built-in instructions;
            if there is no such slot, it is the first slot besides ``labels``.
        every: Number of rounds from one proposal to the next.
    """

    max_candidates: ClassVar[int] = 32
    """Maximum number of added candidates; a run of some hundred queries cannot distinguish more."""

    count: ClassVar[int] = 4
    """Candidates per call, with ``scores``."""

    max_tokens: ClassVar[int] = 512
    """Maximum tokens of an answer with several candidates."""

    kind: Literal["scores", "reflection"] = "scores"
    backend: WriterSpec | None = None
    slot: SlotName | None = None
    every: Annotated[int, Field(ge=1, le=10**6)] = 5

    @property
    def merge_every(self) -> int:
        """Number of rounds from one merge of candidates to the next."""
        return 4 * self.every

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.kind == "scores" and self.backend is None:
            raise ValueError("backend: is required for kind scores")
        return self


_Start = Annotated[
    tuple[Shares, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: ({value: 0.5},) if isinstance(value, str) else value),
]


class PromptSpec(Spec):
    """The tuned prompt.

    Attributes:
        length: n, the number of positions. With slots it is computed from the slots.
        vocabulary: Source of the N candidates of every position; null with slots.
        slots: Instead of `vocabulary`: the parts of the prompt in order.
        start: Probabilities of candidates when the run starts: one mapping for each position, from
            the first. A text in place of the list has probability 1/2 at the first position. At
            positions without a mapping, the blank candidate has probability 1/2. What remains of 1
            is spread equally over all candidates. Null: all candidates are equally probable.
        length_penalty: Added to a prompt's loss for each of its tokens (4 characters count as one).
        proposer: A model that writes new candidates during the run.
    """

    length: Annotated[int, Field(ge=1, le=1000)] = 20
    vocabulary: VocabularySpec | None = None
    slots: Annotated[tuple[SlotSpec, ...], Field(max_length=64)] = Field(
        default=(), exclude_if=operator.not_
    )
    start: _Start | None = None
    length_penalty: Annotated[float, Field(ge=0, le=1)] = 0.0
    proposer: ProposerSpec | None = Field(default=None, exclude_if=operator.not_)

    @model_validator(mode="after")
    def _check_slots(self) -> Self:
        if not self.slots:
            if self.vocabulary is None:
                raise ValueError("vocabulary: is required without slots")
            return self
        if self.vocabulary is not None:
            raise ValueError("slots: replaces vocabulary; omit one of them")
        names = [slot.name for slot in self.slots]
        if len(set(names)) < len(names):
            raise ValueError("slots: two have the same name")
        if names == [LABELS]:
            raise ValueError("slots: needs a slot besides labels")
        length = sum(slot.repeat for slot in self.slots)
        if "length" in self.model_fields_set and self.length != length:
            raise ValueError(f"length: must be {length}, the number of positions of the slots")
        object.__setattr__(self, "length", length)
        return self

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.start is None:
            return self
        if len(self.start) > self.length:
            raise ValueError(
                f"start: has {len(self.start)} positions, but the prompt has {self.length}"
            )
        blank = self.vocabulary is not None and self.vocabulary.blank
        if len(self.start) < self.length and not blank:
            raise ValueError(
                f"start: has {len(self.start)} of {self.length} positions; it must have all, "
                "because the vocabulary has no blank (empty) candidate"
            )
        for position, shares in enumerate(self.start):
            if sum(shares.values()) > 1.0 + _ROUNDING:
                raise ValueError(f"start: the probabilities of position {position} exceed 1")
        return self

    @model_validator(mode="after")
    def _check_proposer(self) -> Self:
        if self.proposer is None:
            return self
        if not self.slots:
            raise ValueError("proposer: needs slots")
        if self.proposer.slot is not None and self.proposer.slot not in self.text_slots:
            raise ValueError(f"proposer.slot: must be one of {', '.join(self.text_slots)}")
        repeated = {slot.name for slot in self.slots if slot.repeat > 1}
        if self.reflects and self.proposed_slot in repeated:
            raise ValueError("proposer.slot: with kind reflection, must be a slot without repeat")
        return self

    @property
    def reflects(self) -> bool:
        """Whether devices propose candidates."""
        return self.proposer is not None and self.proposer.kind == "reflection"

    @property
    def text_slots(self) -> tuple[str, ...]:
        """The names of all slots besides ``labels``, in order."""
        return tuple(slot.name for slot in self.slots if slot.name != LABELS)

    @property
    def chooses_labels(self) -> bool:
        """Whether a slot selects the label words."""
        return any(slot.name == LABELS for slot in self.slots)

    @property
    def sources(self) -> Iterator[tuple[str, CandidatesSpec]]:
        """The sources of candidates, each with its key in RUN.yaml."""
        if self.vocabulary is not None:
            yield "prompt.vocabulary", self.vocabulary
        for number, slot in enumerate(self.slots):
            yield f"prompt.slots.{number}.candidates", slot.candidates

    @property
    def proposed_slot(self) -> str | None:
        """The slot that the proposer writes for; None without a proposer."""
        if self.proposer is None:
            return None
        built_in = [slot.name for slot in self.slots if slot.candidates.kind == "instructions"]
        return self.proposer.slot or [*built_in, *self.text_slots][0]

    def capacity(self, vocabulary: Vocabulary) -> int:
        """N, the number of candidates, including the candidates that a proposer may add."""
        if self.proposer is None:
            return len(vocabulary)
        slot = len(vocabulary.candidates_of(self.proposed_slot or ""))
        return max(len(vocabulary), slot + self.proposer.max_candidates)

    @property
    def start_tokens(self) -> tuple[str, ...]:
        """Candidates that the vocabulary must contain, because `start` has them."""
        return tuple(token for shares in self.start or () for token in shares)

    def build(
        self, task: TaskSpec, texts: Iterable[str] = (), base_dir: str | Path = "."
    ) -> Vocabulary:
        """Build the candidates.

        Args:
            task: The prompt's task.
            texts: Training texts, for sources that use their statistics.
            base_dir: Base of relative paths.

        Raises:
            DataError: A file is missing or malformed, or a source has too few candidates.
            SpecError: A source does not fit the task.
        """
        if not self.slots:
            return build_vocabulary(self.vocabulary, texts, base_dir, wanted=self.start_tokens)
        texts, starts = list(texts), iter(self.start or ())
        built = []
        for number, slot in enumerate(self.slots):
            wanted = [token for shares in islice(starts, slot.repeat) for token in shares]
            try:
                candidates = _candidates(slot, task, self.text_slots, texts, Path(base_dir), wanted)
                built.append(Slot(name=slot.name, candidates=candidates, repeat=slot.repeat))
            except (DataError, SpecError) as exc:
                raise type(exc)(f"slots.{number} ({slot.name}): {exc}") from exc
            except ValidationError as exc:
                problem = exc.errors()[0]["msg"].removeprefix("Value error, ")
                raise DataError(f"slots.{number} ({slot.name}): {problem}") from None
        return Vocabulary(slots=tuple(built))

    def warm_start(self, vocabulary: Vocabulary) -> Start | None:
        """Return `start` for all positions, with indices in place of the candidates' texts."""
        if self.start is None:
            return None
        starts = [*self.start, *[{"": 0.5}] * (self.length - len(self.start))]
        rows = []
        for position, shares in enumerate(starts):
            candidates = vocabulary.of_position(position)
            index = {token: number for number, token in enumerate(candidates)}
            rows.append(tuple((index[token], share) for token, share in shares.items()))
        return tuple(rows)


def _candidates(
    slot: SlotSpec,
    task: TaskSpec,
    slots: Sequence[str],
    texts: Sequence[str],
    base_dir: Path,
    wanted: Sequence[str],
) -> tuple[str, ...]:
    source = slot.candidates
    if source.kind == "codes":
        codes = instructions.code_candidates({label: label for label in task.labels})
        candidates = codes[: source.size]
    elif isinstance(source, instructions.InstructionsSource):
        candidates = instructions.instruction_candidates(
            description=task.description or Description(), labels=task.labels, size=source.size
        )
    elif isinstance(source, label_sets.LabelsSource):
        candidates = label_sets.label_candidates(task.labels, source.sets)
    elif isinstance(source, OwnSource):
        candidates = _own_candidates(source, task, texts, base_dir)
    elif isinstance(source, demonstrations.DemonstrationsSource):
        rows = load_examples(source.file, folder=base_dir)
        candidates = demonstrations.demonstration_candidates(
            task, slot.name, rows, slots=slots, shots=source.shots, blocks=source.blocks
        )
    elif isinstance(source, ListVocabulary) and len(source.candidates) == 1:
        candidates = source.candidates  # A slot may have only one; `build_vocabulary` needs two.
    else:
        return build_vocabulary(source, texts, base_dir, wanted=wanted).candidates
    return tuple(dict.fromkeys((*candidates, *wanted)))


def _own_candidates(
    source: OwnSource, task: TaskSpec, texts: Sequence[str], base_dir: Path
) -> tuple[str, ...]:
    make = load_object("candidates.object", source.object, base_dir, group="fedone.candidates")
    try:
        candidates = tuple(make(task=task, texts=texts, **source.options))
    except (DataError, SpecError):
        raise
    except Exception as exc:  # User code may raise any exception.
        reason = f"{type(exc).__name__}: {exc}"
        raise DataError(f"candidates.object: {source.object} failed: {reason}") from exc
    if not all(isinstance(text, str) for text in candidates):
        raise DataError(f"candidates.object: {source.object} returns a value that is not text")
    return candidates
