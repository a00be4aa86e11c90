"""Reasons of failures that may leave the device: without text that may quote private data."""

from __future__ import annotations

from pydantic import ValidationError

from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetError,
    FedOneError,
    LabelWordError,
)

_KINDS: dict[type[Exception], str] = {
    LabelWordError: "a label word is not one token of the client's model",
    BackendBlocked: "the client's model cannot be queried until its configuration changes",
    BackendUnavailable: "the client's model is not available now",
    BackendError: "the client's model failed",
    BudgetError: "the budget of the client's model has nothing left for this",
}
"""By error type; the first match counts."""


def reason_of(failure: Exception) -> str:
    """Return why work is declined, for the server and the app.

    A model's error may quote the request, so its text stays in the device's log.
    """
    for kind, words in _KINDS.items():
        if isinstance(failure, kind):
            return words
    if not isinstance(failure, FedOneError):
        return f"the client failed with {type(failure).__name__}"
    return str(failure)


def problem_of(refusal: ValidationError) -> str:
    """Return where a message is malformed, and how.

    Args:
        refusal: Its first problem is described, without the input, which may have a credential or
            private text.
    """
    first = refusal.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(step) for step in first["loc"])[:100]
    return f"{where}: {first['msg'][:200]}"
