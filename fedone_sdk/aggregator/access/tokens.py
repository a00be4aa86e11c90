"""Who may talk to the aggregator: secrets, their digests, and the roles of people."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Self

from fedone_sdk.errors import ProblemError

__all__ = [
    "AdminToken",
    "Authority",
    "EnrolmentToken",
    "ROLES",
    "Role",
    "check_patterns",
    "digest",
    "may_see",
    "new_secret",
]

Role = Literal["viewer", "operator", "admin"]

ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
"""Each may do what those before it may: look at runs; steer them; let devices and people in."""

_PATTERN = re.compile(r"[A-Za-z0-9_.*-]{1,64}")


def new_secret(prefix: str) -> str:
    """A fresh secret of 256 bits; the prefix tells people and scanners what it is."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(secret: str) -> str:
    """The hex SHA-256 of a secret: high-entropy secrets need no slow hash.

    A header may hold bytes that are no text; they come as lone surrogates.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def may_see(patterns: Iterable[str] | None, run_id: str) -> bool:
    """Whether a run is one of those that somebody is let in for; None is all runs."""
    return patterns is None or any(fnmatchcase(run_id, pattern) for pattern in patterns)


def check_patterns(patterns: Iterable[str] | None) -> tuple[str, ...] | None:
    """Patterns of run names, where ``*`` stands for any text.

    Raises:
        ValueError: There are none, or one has characters that no run's name has.
    """
    if patterns is None:
        return None
    found = tuple(patterns)
    if not found:
        raise ValueError("runs must name at least one run or pattern; leave it out for all runs")
    for pattern in found:
        # Nothing else that fnmatch knows can occur in it.
        if _PATTERN.fullmatch(pattern) is None:
            raise ValueError(
                "a pattern of runs is 1 to 64 letters, digits, dots, dashes, underscores and *"
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentToken:
    """A configured token that lets devices enrol; only its digest is kept.

    Attributes:
        token_sha256: Digest of the secret.
        name: What people call it; None is numbered.
        runs: Patterns of the runs that its clients may see; None is all.
        expires_at: When it stops working, seconds since the epoch; None is never.
        uses: How many clients may enrol with it; None is no limit.
    """

    token_sha256: str
    name: str | None = None
    runs: tuple[str, ...] | None = None
    expires_at: float | None = None
    uses: int | None = None

    @classmethod
    def of(cls, secret: str) -> Self:
        """A token without any limit."""
        return cls(token_sha256=digest(secret))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminToken:
    """A person, as far as a token tells; only its digest is kept.

    Attributes:
        token_sha256: Digest of the secret.
        name: What people call it; stands in the log.
        role: What it allows.
        runs: Patterns of the runs that it is good for; None is all. Who lets others in is never
            bound to some runs.
    """

    token_sha256: str
    name: str
    role: Role
    runs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.role == "admin" and self.runs is not None:
            raise ValueError("role admin is for all runs; give a viewer or operator runs instead")

    def allows(self, role: Role) -> bool:
        """Whether it does for what this role may do."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Authority:
    """What is configured of who may come in.

    Args:
        enrolment_tokens: Let a device enrol: secrets, or more than a secret.
        admin_token: Secret of a person in role admin.
        admin_tokens: More people, in their roles.
        require_signatures: Whether every device must sign its requests.
        signature_window_s: How far the clock of a device that signs may be off, seconds.

    Attributes:
        enrolment_tokens: The configured tokens.
        require_signatures: As given.
        signature_window_s: As given.

    Raises:
        ValueError: Two people share a secret or a name, or one has a device's.
    """

    def __init__(
        self,
        *,
        enrolment_tokens: Iterable[str | EnrolmentToken] = (),
        admin_token: str | None = None,
        admin_tokens: Iterable[AdminToken] = (),
        require_signatures: bool = False,
        signature_window_s: float = 300.0,
    ) -> None:
        self.enrolment_tokens = tuple(
            EnrolmentToken.of(token) if isinstance(token, str) else token
            for token in enrolment_tokens
        )
        self.require_signatures = require_signatures
        self.signature_window_s = signature_window_s
        self._people = list(admin_tokens)
        if admin_token is not None:
            person = AdminToken(token_sha256=digest(admin_token), name="admin_token", role="admin")
            self._people.append(person)
        devices = {token.token_sha256 for token in self.enrolment_tokens}
        people = {person.token_sha256 for person in self._people}
        if devices & people:
            raise ValueError("an admin token must not be one that devices enrol with")
        if len(people) < len(self._people):
            raise ValueError("two admin tokens have the same secret")
        if len({person.name for person in self._people}) < len(self._people):
            raise ValueError("two admin tokens have the same name")

    def person(self, token: str | None) -> AdminToken | None:
        """Whose admin token this is; None is nobody's."""
        if token is None:
            return None
        given = digest(token)
        # Every entry is compared: how long it takes tells nothing about which one matched.
        known = [
            person for person in self._people if hmac.compare_digest(given, person.token_sha256)
        ]
        return known[0] if known else None

    def check(self, token: str | None, role: Role) -> AdminToken:
        """Lets a person in who may do what a role may.

        Raises:
            ProblemError: ``unauthorized``; ``forbidden`` where the token is of a lesser role, or
                no admin token is configured.
        """
        if not self._people:
            raise ProblemError("forbidden", "this server has no admin token configured")
        person = self.person(token)
        if person is None:
            raise ProblemError("unauthorized", "this needs an admin token")
        if not person.allows(role):
            raise ProblemError("forbidden", f"this needs role {role}; the token has {person.role}")
        return person
