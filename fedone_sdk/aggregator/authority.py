"""Tokens of devices and users: secrets, digests, roles, and the section ``auth`` of CONFIG.yaml."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import is_sendable
from fedone_sdk.spec import Spec
from fedone_sdk.stores import TokenRecord

Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "operator", "admin")
"""Roles in ascending order. A viewer reads runs, an operator also controls runs, and an admin also
manages devices and tokens."""

_PATTERN = re.compile(r"[A-Za-z0-9_.*-]{1,64}")


def new_secret(prefix: str) -> str:
    """Return a new 256-bit secret with a prefix that secret scanners recognise."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


def digest(secret: str) -> str:
    """Return the hex SHA-256 of a secret; a slow hash is unnecessary for secrets of high entropy.

    Header bytes that are not UTF-8 (lone surrogates in `secret`) are hashed unchanged.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def may_see(patterns: Iterable[str] | None, run_id: str) -> bool:
    """Whether a run's name matches one of the patterns; None matches all runs."""
    return patterns is None or any(fnmatchcase(run_id, pattern) for pattern in patterns)


_MIN_CHARS = 20
_MIN_DISTINCT_CHARS = 8

MAKE_A_TOKEN = """python3 -c "import secrets; print(secrets.token_urlsafe(32))\""""
"""Command that generates a token, for error messages."""


def _secret(value: object) -> object:
    # Raises ValueErrors of its own, because pydantic's messages would contain the secret.
    if isinstance(value, SecretStr):
        return value
    if isinstance(value, dict) and value.keys() == {"env"} and isinstance(value["env"], str):
        if value["env"] not in os.environ:
            raise ValueError(f"the environment variable {value['env']} is not set")
        value = os.environ[value["env"]]
    if not isinstance(value, str):
        raise ValueError("must be a token in quotes, or {env: NAME} for an environment variable")
    if not value.isprintable() or not value:
        raise ValueError("must be printable, and not empty")
    return value


def _token(value: object) -> object:
    token = _secret(value)
    if isinstance(token, str) and (not is_sendable(token) or " " in token):
        raise ValueError("must be printable ASCII without spaces, and not empty")
    return token


SecretText = Annotated[SecretStr, BeforeValidator(_secret)]
"""A secret: text, or ``{env: NAME}`` to read it from the environment. No error contains it."""
Token = Annotated[SecretStr, BeforeValidator(_token)]
"""A secret that is sent in a header."""

TokenName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def _run_patterns(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
        raise ValueError("must be a list of names of runs; * stands for any text")
    if not value:
        raise ValueError("must have at least one run or pattern; leave out the key for all runs")
    # Of the special characters of `fnmatch`, the pattern allows only the asterisk.
    if not all(map(_PATTERN.fullmatch, value)):
        raise ValueError(
            "a pattern of runs is 1 to 64 letters, digits, dots, dashes, underscores and *"
        )
    return tuple(value)


Runs = Annotated[tuple[str, ...] | None, BeforeValidator(_run_patterns)]


class _Secret(Spec):
    # By default, an error of pydantic contains its input.
    model_config = ConfigDict(hide_input_in_errors=True)

    token: Token

    @property
    def token_sha256(self) -> str:
        return digest(self.token.get_secret_value())


class EnrolmentToken(_Secret):
    """A configured token that devices enrol with.

    Attributes:
        name: Name of the token in logs and lists; by default a number.
        runs: Names of the runs that its clients may access (``*`` is any text); null allows all.
        expires: Date and time with UTC offset, after which no client can enrol with the token.
        uses: Maximal number of clients that can enrol with the token.
    """

    name: TokenName | None = None
    runs: Runs = None
    expires: AwareDatetime | None = None
    uses: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None

    def record(self, name: str, created_at: float) -> TokenRecord:
        """Return the record for the store, which contains only a digest of the secret."""
        return TokenRecord(
            name=name,
            token_sha256=self.token_sha256,
            runs=self.runs,
            uses_left=self.uses,
            expires_at=None if self.expires is None else self.expires.timestamp(),
            created_at=created_at,
        )


class AdminToken(_Secret):
    """A user's token.

    Attributes:
        runs: Names of the runs that the token is valid for (``*`` is any text); null allows all.
    """

    name: TokenName
    role: Role
    runs: Runs = None

    @model_validator(mode="after")
    def _check_scope(self) -> Self:
        if self.role == "admin" and self.runs is not None:
            raise ValueError("runs: cannot limit role admin; use role viewer or operator instead")
        return self

    def allows(self, role: Role) -> bool:
        """Whether the user's role includes this role."""
        return ROLES.index(self.role) >= ROLES.index(role)


def _with_token(value: object) -> dict[str, Any]:
    """Return a token of the configuration as a mapping with the key ``token``."""
    if not isinstance(value, dict) or value.keys() == {"env"}:
        return {"token": value}
    if "env" not in value:
        return value
    if "token" in value:
        raise ValueError("must have either token or env, not both")
    others = {name: part for name, part in value.items() if name != "env"}
    return {"token": {"env": value["env"]}, **others}


def _list_of(kind: str) -> BeforeValidator:
    """Return the validator of a list of tokens; `kind` describes the tokens in errors."""

    def validate(value: object) -> object:
        # A text is iterable too, but its characters are not tokens.
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise ValueError(f"must be a list of {kind}")
        return tuple(part if isinstance(part, Spec) else _with_token(part) for part in value)

    return BeforeValidator(validate)


class Authority(Spec):
    """Section ``auth``: the tokens of devices, and the tokens and roles of users.

    A token is a text, or ``{env: NAME}`` to read it from the environment variable NAME.

    Attributes:
        admin_token: Token of a user in role admin.
        admin_tokens: Tokens of other users, with their roles. If neither `admin_token` nor
            `admin_tokens` is set, the routes for users are disabled.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    enrolment_tokens: Annotated[tuple[EnrolmentToken, ...], _list_of("tokens")] = ()
    admin_token: Token | None = None
    admin_tokens: Annotated[
        tuple[AdminToken, ...], _list_of("mappings with token (or env), name and role")
    ] = ()

    @cached_property
    def _people(self) -> tuple[AdminToken, ...]:
        if self.admin_token is None:
            return self.admin_tokens
        admin = AdminToken(token=self.admin_token, name="admin_token", role="admin")
        return (*self.admin_tokens, admin)

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        for key, tokens in (
            ("enrolment_tokens", self.enrolment_tokens),
            ("admin_tokens", self._people),
        ):
            names = [token.name for token in tokens if token.name is not None]
            digests = [token.token_sha256 for token in tokens]
            for what, values in ("name", names), ("secret", digests):
                if len(set(values)) < len(values):
                    raise ValueError(f"{key}: two tokens have the same {what}")
        enrolment_digests = {token.token_sha256 for token in self.enrolment_tokens}
        if any(person.token_sha256 in enrolment_digests for person in self._people):
            raise ValueError("admin_tokens: a token must not also be an enrolment token")
        return self

    def person(self, token: str | None) -> AdminToken | None:
        """Return the admin token with this secret, if any."""
        if token is None:
            return None
        sha256 = digest(token)
        # Compares with all tokens, so that the duration does not reveal which token matched.
        matches = [p for p in self._people if hmac.compare_digest(sha256, p.token_sha256)]
        return matches[0] if matches else None

    def check(self, token: str | None, role: Role) -> AdminToken:
        """Return the admin token with this secret (``unauthorized`` if unknown).

        Raises:
            ProblemError: ``forbidden`` if its role does not include `role`, or if no admin token is
                configured.
        """
        if not self._people:
            raise ProblemError("forbidden", "this server has no admin token configured")
        person = self.person(token)
        if person is None:
            raise ProblemError("unauthorized", "this needs an admin token")
        if not person.allows(role):
            raise ProblemError("forbidden", f"this needs role {role}; the token has {person.role}")
        return person

    @property
    def guessable(self) -> list[str]:
        """Keys of tokens that are too short or too regular to be secure."""
        tokens = {
            f"{kind}.{index}": entry.token
            for kind in ("enrolment_tokens", "admin_tokens")
            for index, entry in enumerate(getattr(self, kind))
        }
        if self.admin_token is not None:
            tokens["admin_token"] = self.admin_token
        return [key for key, token in tokens.items() if _is_guessable(token.get_secret_value())]


def _is_guessable(secret: str) -> bool:
    return len(secret) < _MIN_CHARS or len(set(secret)) < _MIN_DISTINCT_CHARS
