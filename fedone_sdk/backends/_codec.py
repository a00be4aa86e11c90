"""Lossless JSON for queries, answers and errors, and the key of a query."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from hashlib import blake2b
from typing import Any

from fedone_sdk.backends.base import Answer, Query
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable, LabelWordError
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import Part

_ERRORS = (LabelWordError, BackendUnavailable, BackendBlocked, BackendError)


def dump(value: object) -> bytes:
    """One line of JSON. Floats have the shortest form that parses to the same value."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # "surrogatepass": the model rejects lone surrogates.
    return text.encode("utf-8", "surrogatepass")


def query_key(fingerprint: str, query: Query, shortened: object | None = None) -> bytes:
    """16-byte key of a query to a model, independent of the payer.

    `shortened` is the truncated form of inputs that are too long; None if no input is.
    """
    named = [fingerprint, *dump_query(query).values()]
    if shortened is not None:
        named.append({"shortened": shortened})
    return blake2b(dump(named), digest_size=16).digest()


def dump_query(query: Query) -> dict[str, object]:
    """Return a query for JSON, without its payer. Keys depend on the order of its values."""
    dumped: dict[str, object] = {
        "want": query.want,
        "label_words": query.label_words,
        "inputs": query.inputs,
        "references": query.references,
        "max_tokens": query.max_tokens,
    }
    soft = query.soft_prompt
    if soft is not None:
        data = b64encode(soft.data).decode("ascii")
        dumped["soft_prompt"] = {"kind": soft.kind, "shape": soft.shape, "data": data}
    return dumped


def load_query(found: dict[str, Any]) -> Query:
    """Load the result of `dump_query`.

    Raises:
        KeyError, TypeError, ValueError: The value has another form.
    """
    return Query(
        want=found["want"],
        label_words=tuple(found["label_words"]),
        inputs=tuple(tuple(Part(*part) for part in rendered) for rendered in found["inputs"]),
        references=tuple(found["references"]),
        max_tokens=found["max_tokens"],
        soft_prompt=_load_soft_prompt(found.get("soft_prompt")),
    )


def _load_soft_prompt(found: dict[str, Any] | None) -> SoftPrompt | None:
    if found is None:
        return None
    rows, columns = found["shape"]
    return SoftPrompt(found["kind"], (rows, columns), b64decode(found["data"], validate=True))


def dump_answer(answer: Answer) -> dict[str, object]:
    """Return an answer for JSON, without the rate limits, which are short-lived."""
    return {
        "log_probs": answer.log_probs,
        "texts": answer.texts,
        "censored": answer.censored,
        "cached": answer.cached,
        "model": answer.model,
        "usage": answer.usage.exact(),
    }


def load_answer(found: dict[str, Any]) -> Answer:
    """Load the result of `dump_answer`.

    Raises:
        KeyError, TypeError, ValueError: The value has another form.
    """
    try:
        rows = tuple(
            None if row is None else tuple(float(value) for value in row)
            for row in found["log_probs"]
        )
    except OverflowError as exc:
        raise ValueError("a log-probability is too large") from exc
    return Answer(
        log_probs=rows,
        texts=tuple(found["texts"]),
        censored=found["censored"],
        cached=found["cached"],
        model=found["model"],
        usage=Usage.model_validate(found["usage"]),
    )


def dump_error(error: BaseException) -> dict[str, object]:
    """Return an error for JSON, with all attributes of backend errors."""
    if not isinstance(error, BackendError):
        return {"class": type(error).__name__, "message": str(error)}
    found: dict[str, object] = {
        "class": next(known.__name__ for known in _ERRORS if isinstance(error, known)),
        "message": error.summary,
        "usage": None if error.usage is None else error.usage.exact(),
        **{name: value for name, value in error.private.items() if value},
    }
    if isinstance(error, BackendUnavailable):
        found["retry_after_s"] = error.retry_after_s
    if isinstance(error, LabelWordError):
        found |= {"word": error.word, "tokens": error.tokens, "way_out": error.way_out}
    return found


def load_error(found: dict[str, Any]) -> BackendError | None:
    """Load the result of `dump_error`; None if it is not a backend's error.

    Raises:
        KeyError, TypeError, ValueError: The value has another form.
    """
    name, message = str(found["class"]), str(found["message"])
    if name not in {known.__name__ for known in _ERRORS}:
        return None
    usage = None if found["usage"] is None else Usage.model_validate(found["usage"])
    if name == "LabelWordError":
        error = LabelWordError(found["word"], found["tokens"], found["way_out"])
        error.usage = usage
        return error
    private = {name: found[name] for name in ("url", "key_env", "said") if name in found}
    if any(not isinstance(value, str) for value in private.values()):
        raise ValueError("url, key_env and said must be texts")
    if name == "BackendUnavailable":
        wait_s = found["retry_after_s"]
        return BackendUnavailable(message, usage=usage, retry_after_s=wait_s, **private)
    kind = BackendBlocked if name == "BackendBlocked" else BackendError
    return kind(message, usage=usage, **private)
