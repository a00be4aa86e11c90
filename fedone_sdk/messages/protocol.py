"""Protocol version and secrets in request headers."""

from __future__ import annotations

from fedone_sdk.errors import ProblemError

PROTOCOL_HEADER = "FedOne-Protocol"
"""Header with the sender's version in requests, and the server's newest version in responses."""

PROTOCOL_VERSION = 1
"""Newest supported version."""

OLDEST_PROTOCOL = 1
"""Oldest supported version."""


def check_protocol(given: str | None) -> None:
    """Refuse unsupported versions.

    Args:
        given: The header's value; None is version 1, which had no header.

    Raises:
        ProblemError: ``upgrade_required``, for versions that are too old or too new.
    """
    version = 1 if given is None else int(given) if _is_version(given) else None
    if version is None or not OLDEST_PROTOCOL <= version <= PROTOCOL_VERSION:
        served = (
            f"version {PROTOCOL_VERSION}"
            if OLDEST_PROTOCOL == PROTOCOL_VERSION
            else f"versions {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
        )
        said = "it does not name one" if version is None else f"the request speaks {version}"
        raise ProblemError(
            "upgrade_required", f"this server speaks {served} of the protocol; {said}"
        )


def is_sendable(secret: str) -> bool:
    """Whether a secret can be sent in a header: printable ASCII, not empty."""
    return bool(secret) and secret.isascii() and secret.isprintable()


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6
