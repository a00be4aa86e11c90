"""The messages of `fedone gateway`: whoever holds a token asks the model behind it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PlainSerializer, WithJsonSchema, model_validator

from fedone_sdk.budget import Usage
from fedone_sdk.messages.base import Message
from fedone_sdk.messages.problem import Problem

__all__ = [
    "LabelWords",
    "MAX_INPUTS",
    "MAX_INPUT_CHARS",
    "ModelAnswer",
    "ModelInfo",
    "ModelProblem",
    "ModelQuery",
]

MAX_INPUTS = 1024
"""The most inputs of one query."""

MAX_INPUT_CHARS = 100_000
"""The longest stretch of an input, and the longest text that comes back."""

_Want = Literal["labels", "choice", "reference", "text"]
_Text = Annotated[str, Field(max_length=MAX_INPUT_CHARS)]
_Part = tuple[Literal["text", "prompt", "field", "mask", "role"], _Text]
_ROLES = (("user", "assistant"), ("system", "user", "assistant"))


def _check_roles(parts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    roles = tuple(text for kind, text in parts if kind == "role")
    if roles and (parts[0][0] != "role" or roles not in _ROLES):
        raise ValueError("roles: a chat is (system,) user and assistant, each opened by its role")
    return parts


_Input = Annotated[tuple[_Part, ...], Field(max_length=256), AfterValidator(_check_roles)]
_Word = Annotated[str, Field(min_length=1, max_length=1000)]
_Words = Annotated[tuple[_Word, ...], Field(max_length=64)]
_Row = Annotated[tuple[float, ...], Field(max_length=64)]
# Money as text: through a float, a bill could differ from its quote in the last digit.
_Usage = Annotated[
    Usage,
    PlainSerializer(Usage.exact, when_used="json"),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                **{
                    unit: {"type": "integer", "minimum": 0, "maximum": 2**53}
                    for unit in ("queries", "requests", "prompt_tokens", "completion_tokens")
                },
                "usd": {"type": "string", "pattern": r"^\d+(\.\d+)?(E[+-]?\d+)?$"},
            },
            "additionalProperties": False,
        }
    ),
]


class LabelWords(Message):
    """``POST /v1/model/check``: whether the model is there, and each label word one token of it.

    Attributes:
        label_words: With their leading spaces.
        form: An input of the task without content, as in `ModelQuery`; empty checks the label
            words alone.
    """

    label_words: _Words = ()
    form: _Input = ()


class ModelInfo(Message):
    """The model behind a gateway.

    Attributes:
        fingerprint: Names the exact model.
        bounds: The units that are really bounded before they are spent.
        answers: What may be asked.
        censors: Whether log-probabilities of labels may be upper bounds only.
        max_inputs: The most inputs of one query.
        worst: The most that a query of 1, 2, 4, 8 ... inputs may cost, up to `max_inputs`.
    """

    fingerprint: Annotated[str, Field(min_length=1, max_length=300)]
    bounds: Annotated[tuple[Annotated[str, Field(max_length=30)], ...], Field(max_length=16)]
    answers: Annotated[tuple[_Want, ...], Field(max_length=4)]
    censors: bool = False
    max_inputs: Annotated[int, Field(ge=1, le=MAX_INPUTS)]
    worst: Annotated[tuple[_Usage, ...], Field(max_length=11)]

    @model_validator(mode="after")
    def _check_worst(self) -> Self:
        if len(self.worst) != self.max_inputs.bit_length():
            raise ValueError("worst: needs one entry per power of 2 up to max_inputs")
        return self


class ModelQuery(Message):
    """``POST /v1/model/score`` and ``/v1/model/quote``: one prompt on one mini-batch.

    Attributes:
        want: What is asked about each input: log-probabilities of the label words, which of them
            the model writes, the log-probability of a reference text, or a text.
        inputs: Each a list of [kind, text] pairs. Only ``field`` pairs may be shortened to fit the
            model; a ``mask`` has no text. In a chat a ``role`` pair opens each message, the last
            one the ``assistant``'s.
        label_words: For ``labels`` and ``choice``, with their leading spaces.
        references: For ``reference``, one text per input.
        max_tokens: For ``text``, the longest that is written, tokens.
        worst: The most that may be spent: what was quoted before. Null sets no bound.
    """

    want: _Want = "labels"
    inputs: Annotated[tuple[_Input, ...], Field(min_length=1, max_length=MAX_INPUTS)]
    label_words: _Words = ()
    references: Annotated[tuple[_Text, ...], Field(max_length=MAX_INPUTS)] = ()
    max_tokens: Annotated[int, Field(ge=0, le=4096)] = 0
    worst: _Usage | None = None

    @model_validator(mode="after")
    def _check_want(self) -> Self:
        if bool(self.label_words) != (self.want in ("labels", "choice")):
            raise ValueError("label_words go with labels and choice, and only with them")
        if len(self.references) != (len(self.inputs) if self.want == "reference" else 0):
            raise ValueError("references: one per input goes with reference, and only with it")
        if bool(self.max_tokens) != (self.want == "text"):
            raise ValueError("max_tokens goes with text, and only with it")
        return self


class ModelAnswer(Message):
    """What the model answered.

    Attributes:
        fingerprint: Names the exact model.
        log_probs: Per input one number per label word (``reference``: one, ``text``: none), nats;
            null where this input failed.
        texts: Per input what the model wrote, for ``text`` alone; null where it failed.
        usage: What was spent for this answer, attempts that failed included.
        cached: Whether the answer was known already.
        censored: How many of the log-probabilities are upper bounds.
        model: What the provider calls the model that answered, where it says.
    """

    fingerprint: Annotated[str, Field(min_length=1, max_length=300)]
    log_probs: Annotated[tuple[_Row | None, ...], Field(min_length=1, max_length=MAX_INPUTS)]
    texts: Annotated[tuple[_Text | None, ...], Field(max_length=MAX_INPUTS)] = ()
    usage: _Usage
    cached: bool = False
    censored: Annotated[int, Field(ge=0, le=2**31)] = 0
    model: Annotated[str, Field(max_length=1000)] | None = None


class ModelProblem(Problem):
    """A `Problem` that says what a failed query cost.

    Attributes:
        type: As there.
        title: As there.
        status: As there.
        code: As there.
        detail: As there.
        usage: What was spent all the same; null where nobody knows.
        retry_after_s: How long the provider asks to wait, seconds.
        word: The label word, for ``label_word``.
        tokens: What the model makes of it.
    """

    usage: _Usage | None = None
    retry_after_s: Annotated[float, Field(ge=0)] | None = None
    word: str | None = None
    tokens: tuple[str, ...] = ()
