"""The two content types of a message: JSON, or a safetensors file that contains the JSON.

JSON is always supported. In the other form, the message's arrays are the tensors of a safetensors
file, and ``message`` in its ``__metadata__`` is the JSON, in which an array is
``{"tensor": NAME}``. Both parse to the same message with the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedone_sdk.messages.array import Array
from fedone_sdk.messages.base import Message
from fedone_sdk.messages.tensors import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    Apart,
    Tensor,
    dump_tensors,
    load_tensors,
)

JSON = "application/json"
"""Content type that all peers support."""

TENSORS = "application/vnd.fedone.safetensors"
"""Content type of messages with arrays, between peers that both support it."""

_KEY = "message"

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Body(NamedTuple):
    """An encoded message.

    Attributes:
        content_type: `JSON` or `TENSORS`.
        content: The bytes.
    """

    content_type: str
    content: bytes


class Parse(Protocol[T_co]):
    """Parser of a message: ``model_validate_json``, or `model_validate` of what `load` returns."""

    def __call__(self, document: Any, /, *, context: Any = None) -> T_co:
        """Return the message, or raise pydantic's ``ValidationError``."""
        ...


def encode(message: Message, accept: str = "") -> Body:
    """Encode a message in the shortest content type that its reader accepts.

    Equal messages give equal bytes.

    Args:
        message: The message.
        accept: Value of the reader's ``Accept``; JSON is implied.
    """
    if message.holds_arrays and _takes_tensors(accept):
        tensors = {
            place: Tensor(array.dtype, array.shape, array.to_bytes())
            for place, array in _arrays(message, "")
        }
        if 0 < len(tensors) <= MAX_TENSORS:
            document = message.model_dump_json(context=Apart(tensors))
            content = dump_tensors(tensors, {_KEY: document})
            raw = sum(len(tensor.data) for tensor in tensors.values())
            # Base64 adds a third; type and shape take the same space in both.
            shorter = len(content) < len(document) + raw * 4 // 3
            if shorter and len(content) - raw - 8 <= MAX_HEADER_BYTES:
                return Body(TENSORS, content)
    return Body(JSON, message.model_dump_json().encode())


def decode(
    parse: Parse[T],
    content: bytes,
    content_type: str = JSON,
    *,
    load: Callable[[bytes], Any] | None = None,
) -> T:
    """Decode a message of either content type.

    Args:
        parse: Parses the JSON.
        content: The body.
        content_type: `TENSORS`, or any other value for JSON.
        load: Parses the JSON before `parse`; None leaves that to `parse`.

    Raises:
        ValueError: The message is invalid; for errors of `parse`, pydantic's ``ValidationError``.
    """
    if content_type != TENSORS:
        return parse(content if load is None else load(content))
    tensors, texts = load_tensors(content)
    if texts.keys() != {_KEY}:
        raise ValueError(f"tensors: __metadata__ must hold {_KEY}, and nothing else")
    document, apart = texts[_KEY].encode(), Apart(tensors)
    message = parse(document if load is None else load(document), context=apart)
    apart.check_taken()
    return message


def first_error(refusal: ValidationError) -> str:
    """Return where a message is malformed first, and how.

    Without the input, which may have a credential or private text.
    """
    first = refusal.errors(include_url=False, include_input=False, include_context=False)[0]
    where, wrong = ".".join(map(str, first["loc"]))[:100], first["msg"][:200]
    return f"{where}: {wrong}" if where else wrong


@cache
def has_arrays(kind: Any) -> bool:
    """Whether messages of a type, or of a union of types, may have arrays."""
    return Array.__name__ in TypeAdapter(kind).json_schema().get("$defs", {})


@lru_cache(maxsize=64)
def _takes_tensors(accept: str) -> bool:
    """Whether an ``Accept`` includes the tensor form and does not prefer JSON."""
    weights = {JSON: 0.0, TENSORS: 0.0}
    for entry in accept.split(","):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        if name in weights:
            weights[name] = _weight(parameters)
    return 0 < weights[TENSORS] >= weights[JSON]


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


def _arrays(value: object, place: str) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a message with their places, in serialisation order."""
    if isinstance(value, Array):
        yield place, value
    elif isinstance(value, (BaseModel, Mapping)):
        for name, held in value.items() if isinstance(value, Mapping) else value:
            yield from _arrays(held, f"{place}.{name}" if place else str(name))
    elif isinstance(value, (list, tuple)):
        for number, held in enumerate(value):
            yield from _arrays(held, f"{place}.{number}")
