"""What travels in Flower's messages: calls of the protocol, and the answers to them.

A device calls and a server answers; in Flower the server writes and a node replies. So the two
change places: a node's reply is the next call that it has to make, and the message that follows
holds the answers to all calls of its turn so far, which it makes again, to come as far as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from pydantic import ValidationError

from fedone_sdk.errors import MessageError, ProblemError
from fedone_sdk.messages import (
    JSON,
    PROTOCOL_VERSION,
    TENSORS,
    Body,
    Message,
    Parse,
    Problem,
    check_protocol,
    decode,
    encode,
)

__all__ = [
    "Item",
    "Kind",
    "MAX_BODY_BYTES",
    "PROBLEM",
    "RECORD",
    "item_of",
    "pack",
    "parse",
    "refusal",
    "unpack",
]

Kind = Literal["claim", "task", "vocabulary", "score", "update", "decline"]
"""The calls; a ``decline`` of no assignment says why a node cannot work at all."""

RECORD = "fedone"
"""Names the ConfigRecord that holds them."""

PROBLEM = "application/problem+json"
"""The form of an answer that is a refusal."""

MAX_BODY_BYTES = 32 * 1024 * 1024
"""The longest body, as over HTTP."""

_FORMS = (JSON, TENSORS, PROBLEM)
_MOST_ITEMS = 4096
_KEYS = ("kinds", "subjects", "forms", "bodies")

T = TypeVar("T")

Value = int | list[str] | list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A call, or the answer to one.

    Attributes:
        kind: Which call.
        subject: The run or the assignment that it is about; of a ``score`` the digest of its
            body; empty for ``claim``.
        body: Its message, in one of the forms in which messages travel.
    """

    kind: Kind
    subject: str
    body: Body


def item_of(kind: Kind, subject: str, message: Message | None) -> Item:
    """Writes a call, or an answer; None is a call that says no more."""
    body = Body(JSON, b"") if message is None else encode(message, TENSORS)
    return Item(kind=kind, subject=subject, body=body)


def refusal(call: Item, problem: ProblemError) -> Item:
    """The answer that is a refusal."""
    content = Problem.of(problem).model_dump_json().encode()
    return Item(kind=call.kind, subject=call.subject, body=Body(PROBLEM, content))


def pack(items: Iterable[Item]) -> dict[str, Value]:
    """The values of a ConfigRecord."""
    held = list(items)
    return {
        "protocol": PROTOCOL_VERSION,
        "kinds": [str(item.kind) for item in held],
        "subjects": [item.subject for item in held],
        "forms": [item.body.content_type for item in held],
        "bodies": [item.body.content for item in held],
    }


def unpack(record: Mapping[str, object] | None) -> list[Item]:
    """Reads a record; nothing that it holds is believed before it is looked at.

    Raises:
        MessageError: It is none of `pack`.
        ProblemError: ``upgrade_required``: it is of another version of the protocol.
    """
    if record is None:
        raise MessageError(f"there is no ConfigRecord {RECORD!r}: not a message of FedOne's")
    check_protocol(str(record.get("protocol", "")))
    columns = [record.get(key) for key in _KEYS]
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) != len(_KEYS) or len({len(column) for column in lists}) != 1:
        raise MessageError(f"{RECORD}: {', '.join(_KEYS)} must be lists of one length")
    if len(lists[0]) > _MOST_ITEMS:
        raise MessageError(f"{RECORD}: holds more than {_MOST_ITEMS} items")
    return [_checked(*row) for row in zip(*lists, strict=True)]


def _checked(kind: object, subject: object, form: object, content: object) -> Item:
    if kind not in get_args(Kind):
        raise MessageError(f"{RECORD}: there is no call {str(kind)[:50]!r}")
    if not isinstance(subject, str) or len(subject) > 200 or form not in _FORMS:
        raise MessageError(f"{RECORD}: {kind}: the subject or the form is not one of the protocol")
    if not isinstance(content, bytes) or len(content) > MAX_BODY_BYTES:
        raise MessageError(f"{RECORD}: {kind}: a body is bytes, at most {MAX_BODY_BYTES}")
    return Item(kind=kind, subject=subject, body=Body(str(form), content))  # type: ignore[arg-type]


def parse(reader: Parse[T], item: Item) -> T:
    """Reads the message of a call or of an answer.

    Raises:
        MessageError: It is no such message.
    """
    try:
        return decode(reader, item.body.content, item.body.content_type)
    except ValidationError as exc:
        # Without the input: it may be private text.
        first = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(step) for step in first["loc"])[:100]
        raise MessageError(f"{item.kind}: {where}: {first['msg'][:200]}") from None
    except ValueError as exc:
        raise MessageError(f"{item.kind}: {exc}") from None
