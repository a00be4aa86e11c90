"""Where the candidates of a slot come from: what a run file says of the sources here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

__all__ = ["DemonstrationsSource", "InstructionsSource", "LabelSet", "LabelsSource", "OwnSource"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class InstructionsSource(_Frozen):
    """Instructions that ship with the SDK, in the words of the task's description.

    Attributes:
        size: Use no more than the first N, the blank included; null uses all. The first ones
            differ most from each other.
    """

    kind: Literal["instructions"] = "instructions"
    size: Annotated[int, Field(ge=2)] | None = None


def _unique(shots: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(shots)) < len(shots):
        raise ValueError("a number of shots stands twice")
    return shots


class DemonstrationsSource(_Frozen):
    """Blocks of solved examples from a public labelled file.

    The examples are shown to the model on every device, and travel there as part of the prompt.

    Attributes:
        file: A labelled file in one of the formats that `fedone_sdk.data.load_examples` reads. A
            relative path starts at the run file's folder.
        shots: How many examples a block has; 0 is the blank candidate.
        blocks: How many different blocks are made for each number of shots; fewer where the file
            has not as many.
        seed: Fixes which examples are drawn.
        max_chars: Examples that take more characters as a shot are used only where a class has
            not enough shorter ones.
    """

    kind: Literal["demonstrations"] = "demonstrations"
    file: Annotated[str, Field(min_length=1)]
    shots: Annotated[
        tuple[Annotated[int, Field(ge=0, le=64)], ...],
        Field(min_length=1, max_length=16),
        AfterValidator(_unique),
    ] = (0, 2, 4)
    blocks: Annotated[int, Field(ge=1, le=1024)] = 4
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    max_chars: Annotated[int, Field(ge=1, le=4000)] = 300


class OwnSource(_Frozen):
    """A function of your own, which returns the candidates.

    Attributes:
        object: ``package.module:function``, also from a module next to the run file, or the name
            of an entry point of the group ``fedone.candidates``. It is called with ``task``, with
            ``texts`` (the training texts, where they are at hand) and the options.
        options: Its other keyword arguments.
    """

    kind: Literal["own"] = "own"
    object: Annotated[str, Field(min_length=1, max_length=200)]
    options: dict[str, JsonValue] = Field(default_factory=dict)


def _label_key(value: object) -> object:
    return str(value) if isinstance(value, (int, bool)) else value


LabelSet = dict[Annotated[str, BeforeValidator(_label_key)], str] | tuple[str, ...]
"""One label word per class: by label value, or in the task's label order."""


class LabelsSource(_Frozen):
    """Sets of label words, the task's own among them; for the reserved slot ``labels``.

    Attributes:
        sets: The other sets, their words taken verbatim. None at all takes those that ship with
            the SDK for words like the task's own.
    """

    kind: Literal["labels"] = "labels"
    sets: Annotated[tuple[LabelSet, ...], Field(max_length=1024)] = ()
