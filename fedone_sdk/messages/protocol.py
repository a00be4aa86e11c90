"""What every request carries: the version of the protocol that it speaks, and a secret."""

from __future__ import annotations

from fedone_sdk.errors import ProblemError

__all__ = [
    "OLDEST_PROTOCOL",
    "PROTOCOL_HEADER",
    "PROTOCOL_VERSION",
    "check_protocol",
    "is_sendable",
]

PROTOCOL_HEADER = "FedOne-Protocol"
"""Each request says in it which version its sender speaks, and each answer which is the newest
that its server speaks."""

PROTOCOL_VERSION = 1
"""The newest version."""

OLDEST_PROTOCOL = 1
"""The oldest version that is served."""


def check_protocol(given: str | None) -> None:
    """Refuses versions that are not spoken here.

    Args:
        given: The header's value; None is version 1, which had no header.

    Raises:
        ProblemError: ``upgrade_required``, for versions that are too old and too new alike: who
            can speak several must choose another one.
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
    """Whether a header can carry a token, a credential or a key: printable ASCII, not empty."""
    return bool(secret) and secret.isascii() and secret.isprintable()


def _is_version(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6
