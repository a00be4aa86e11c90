"""Who may talk to the aggregator: enrolment tokens, client credentials, the admin token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from fedone_sdk.errors import ProblemError

__all__ = ["Authority", "digest", "new_secret"]


def new_secret(prefix: str) -> str:
    """A fresh secret of 256 bits; the prefix tells people and scanners what it is."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(secret: str) -> str:
    """The hex SHA-256 of a secret: high-entropy secrets need no slow hash.

    A header may hold bytes that are no text; they come as lone surrogates.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class Authority:
    """Checks bearer tokens in constant time.

    Args:
        enrolment_tokens: Secrets that let a device enrol.
        admin_token: Secret that lets a person steer runs; None shuts these routes.
    """

    def __init__(
        self, *, enrolment_tokens: Iterable[str] = (), admin_token: str | None = None
    ) -> None:
        self._enrolment = [digest(token) for token in enrolment_tokens]
        self._admin = None if admin_token is None else digest(admin_token)

    def check_enrolment(self, token: str | None) -> None:
        """Lets a device enrol.

        Raises:
            ProblemError: ``unauthorized``.
        """
        if token is not None and _matches(token, self._enrolment):
            return
        raise ProblemError("unauthorized", "enrolment needs a valid enrolment token")

    def is_admin(self, token: str | None) -> bool:
        """Whether this is the admin token."""
        return token is not None and self._admin is not None and _matches(token, [self._admin])

    def check_admin(self, token: str | None) -> None:
        """Lets a person steer runs.

        Raises:
            ProblemError: ``unauthorized``, or ``forbidden`` where no admin token is configured.
        """
        if self._admin is None:
            raise ProblemError("forbidden", "this server has no admin token configured")
        if not self.is_admin(token):
            raise ProblemError("unauthorized", "this needs the admin token")


def _matches(token: str, digests: list[str]) -> bool:
    given = digest(token)
    # Every entry is compared: how long it takes tells nothing about which one matched.
    return any([hmac.compare_digest(given, known) for known in digests])
