"""Encoding of Flower messages: calls of the protocol, and their answers.

Over HTTP a device calls and a server answers; in Flower the server sends and a node replies. The
direction is therefore reversed: a node's reply is its next call. The following message holds the
answers to all calls of the turn so far; the node repeats these calls to resume where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

from pydantic import ValidationError

from fedone_sdk.errors import MessageError, ProblemError
from fedone_sdk.messages import (
    PROTOCOL_VERSION,
    Message,
    Parse,
    Problem,
    check_protocol,
    encode,
    first_error,
)

Kind = Literal["claim", "task", "vocabulary", "score", "update", "decline"]
"""The calls; a ``decline`` without an assignment says why a node cannot work."""

RECORD = "fedone"
"""Name of the ConfigRecord with the items."""

JSON = "application/json"

PROBLEM = "application/problem+json"
"""The form of a refusal."""

MAX_BODY_BYTES = 32 * 1024 * 1024
"""The largest body, as over HTTP."""

_FORMS = (JSON, PROBLEM)
_MOST_ITEMS = 4096
_KEYS = ("kinds", "subjects", "forms", "bodies")

T = TypeVar("T")

Value = int | list[str] | list[bytes]


class Body(NamedTuple):
    """An encoded message and its content type, `JSON` or `PROBLEM`."""

    content_type: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A call, or the answer to one.

    Attributes:
        kind: The call.
        subject: The id of its run or assignment; of a ``score``, the digest of its body; empty for
            ``claim``.
        body: The encoded message.
    """

    kind: Kind
    subject: str
    body: Body


def item_of(kind: Kind, subject: str, message: Message | None) -> Item:
    """Encode a call or an answer; None for a call without a body."""
    body = Body(JSON, b"" if message is None else encode(message))
    return Item(kind=kind, subject=subject, body=body)


def refusal(call: Item, problem: ProblemError) -> Item:
    """Return a refusal as the answer to a call."""
    content = Problem.of(problem).model_dump_json().encode()
    return Item(kind=call.kind, subject=call.subject, body=Body(PROBLEM, content))


def pack(items: Iterable[Item]) -> dict[str, Value]:
    """Return items as the values of a ConfigRecord."""
    held = list(items)
    return {
        "protocol": PROTOCOL_VERSION,
        "kinds": [str(item.kind) for item in held],
        "subjects": [item.subject for item in held],
        "forms": [item.body.content_type for item in held],
        "bodies": [item.body.content for item in held],
    }


def unpack(record: Mapping[str, object] | None) -> list[Item]:
    """Decode and validate an untrusted record.

    Raises:
        MessageError: It is not a record of `pack`.
        ProblemError: ``upgrade_required``: it has another protocol version.
    """
    if record is None:
        raise MessageError(f"there is no ConfigRecord {RECORD!r}: not a message of FedOne")
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
    """Decode the message of a call or of an answer.

    Raises:
        MessageError: It is malformed.
    """
    try:
        return reader(item.body.content)
    except ValidationError as exc:
        raise MessageError(f"{item.kind}: {first_error(exc)}") from None
