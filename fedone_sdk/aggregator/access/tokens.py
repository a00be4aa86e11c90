"""Secrets, digests, and the roles of users."""

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

Role = Literal["viewer", "operator", "admin"]

ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
"""In ascending order: read runs; control runs; manage devices and tokens."""

_PATTERN = re.compile(r"[A-Za-z0-9_.*-]{1,64}")


def new_secret(prefix: str) -> str:
    """Return a new 256-bit secret with a prefix that secret scanners recognise."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(secret: str) -> str:
    """Return the hex SHA-256 of a secret; secrets with high entropy need no slow hash.

    Bytes of a header that are not UTF-8 arrive as lone surrogates.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def may_see(patterns: Iterable[str] | None, run_id: str) -> bool:
    """Whether a run's name matches one of the patterns; None matches all runs."""
    return patterns is None or any(fnmatchcase(run_id, pattern) for pattern in patterns)


def check_patterns(patterns: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return checked patterns of run names, in which ``*`` stands for any text.

    Raises:
        ValueError: The list is empty, or a pattern has characters that no run's name has.
    """
    if patterns is None:
        return None
    found = tuple(patterns)
    if not found:
        raise ValueError("runs must name at least one run or pattern; leave it out for all runs")
    for pattern in found:
        # Excludes all other special characters of fnmatch.
        if _PATTERN.fullmatch(pattern) is None:
            raise ValueError(
                "a pattern of runs is 1 to 64 letters, digits, dots, dashes, underscores and *"
            )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentToken:
    """A configured enrolment token, without its secret.

    Attributes:
        name: Its name; None is numbered.
        runs: Patterns of the runs that its clients may access; None is all.
        expires_at: Expiry, seconds since the epoch; None is never.
        uses: Maximal number of clients that enrol with it; None is unlimited.
    """

    token_sha256: str
    name: str | None = None
    runs: tuple[str, ...] | None = None
    expires_at: float | None = None
    uses: int | None = None

    @classmethod
    def of(cls, secret: str) -> Self:
        """Return a token without limits."""
        return cls(token_sha256=digest(secret))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminToken:
    """A user's token, without its secret.

    Attributes:
        runs: Patterns of the runs that it is valid for; None is all. Role admin is always valid for
            all runs.
    """

    token_sha256: str
    name: str
    role: Role
    runs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.role == "admin" and self.runs is not None:
            raise ValueError("role admin is for all runs; give a viewer or operator runs instead")

    def allows(self, role: Role) -> bool:
        """Whether the user's role includes this role."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Authority:
    """The configured tokens and roles.

    Raises:
        ValueError: Two admin tokens share a secret or a name, or one is an enrolment token.
    """

    def __init__(
        self,
        *,
        enrolment_tokens: Iterable[str | EnrolmentToken] = (),
        admin_token: str | None = None,
        admin_tokens: Iterable[AdminToken] = (),
    ) -> None:
        self.enrolment_tokens = tuple(
            EnrolmentToken.of(token) if isinstance(token, str) else token
            for token in enrolment_tokens
        )
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
        """Return the admin token with this secret, if any."""
        if token is None:
            return None
        given = digest(token)
        # Compares all entries: the time must not reveal which one matched.
        known = [
            person for person in self._people if hmac.compare_digest(given, person.token_sha256)
        ]
        return known[0] if known else None

    def check(self, token: str | None, role: Role) -> AdminToken:
        """Return the admin token with this secret if its role includes `role`.

        Raises:
            ProblemError: ``unauthorized``; ``forbidden`` if the role does not suffice, or no admin
                token is configured.
        """
        if not self._people:
            raise ProblemError("forbidden", "this server has no admin token configured")
        person = self.person(token)
        if person is None:
            raise ProblemError("unauthorized", "this needs an admin token")
        if not person.allows(role):
            raise ProblemError("forbidden", f"this needs role {role}; the token has {person.role}")
        return person
