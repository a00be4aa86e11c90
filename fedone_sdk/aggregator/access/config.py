"""``auth`` in CONFIG.yaml: enrolment tokens, admin tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BeforeValidator, Field, SecretStr, model_validator

from fedone_sdk.aggregator.access.tokens import (
    AdminToken,
    EnrolmentToken,
    Role,
    check_patterns,
    digest,
)
from fedone_sdk.messages import is_sendable
from fedone_sdk.spec import Spec

_FEWEST_CHARS = 20
_FEWEST_DIFFERENT = 8

MAKE_A_TOKEN = """python3 -c "import secrets; print(secrets.token_urlsafe(32))\""""
"""Command that generates a token, for error messages."""


def _token(value: object) -> object:
    # Raises its own ValueErrors: pydantic's messages would contain the secret.
    if isinstance(value, SecretStr):
        return value
    if isinstance(value, dict) and value.keys() == {"env"} and isinstance(value["env"], str):
        if value["env"] not in os.environ:
            raise ValueError(f"the environment variable {value['env']} is not set")
        value = os.environ[value["env"]]
    if not isinstance(value, str):
        raise ValueError("must be a token in quotes, or {env: NAME} to read it from NAME")
    if not is_sendable(value) or " " in value:
        raise ValueError("a token is printable ASCII without spaces, and not empty")
    return value


Token = Annotated[SecretStr, BeforeValidator(_token)]
"""A secret: text, or ``{env: NAME}`` to read it from the environment. Errors never show it."""

TokenName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def _patterns(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(part, str) for part in value):
        raise ValueError("must be a list of names of runs; * stands for any text")
    return check_patterns(value)


Runs = Annotated[tuple[str, ...] | None, BeforeValidator(_patterns)]


class EnrolmentTokenConfig(Spec):
    """A token that devices enrol with.

    Attributes:
        name: Its name; numbered by default.
        runs: Names of the runs that its clients may access, with ``*`` for any text; null is all.
        expires: Expiry, a date and time with UTC offset; null is never.
        uses: Maximal number of clients that enrol with it; null is unlimited.
    """

    token: Token
    name: TokenName | None = None
    runs: Runs = None
    expires: AwareDatetime | None = None
    uses: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None

    def build(self) -> EnrolmentToken:
        """Return the token without its secret."""
        return EnrolmentToken(
            token_sha256=digest(self.token.get_secret_value()),
            name=self.name,
            runs=self.runs,
            expires_at=None if self.expires is None else self.expires.timestamp(),
            uses=self.uses,
        )


class AdminTokenConfig(Spec):
    """A user's token.

    Attributes:
        role: viewer reads runs, operator also controls them, admin also manages devices.
        runs: Names of the runs that it is valid for, with ``*`` for any text; null is all.
    """

    token: Token
    name: TokenName
    role: Role
    runs: Runs = None

    @model_validator(mode="after")
    def _check_scope(self) -> Self:
        self.build()
        return self

    def build(self) -> AdminToken:
        """Return the token without its secret."""
        return AdminToken(
            token_sha256=digest(self.token.get_secret_value()),
            name=self.name,
            role=self.role,
            runs=self.runs,
        )


def _with_token(value: object) -> dict[str, Any]:
    """Return a mapping with ``token`` from a token, ``{env: ...}``, or a mapping with either."""
    if not isinstance(value, dict) or value.keys() == {"env"}:
        return {"token": value}
    if "env" not in value:
        return value
    if "token" in value:
        raise ValueError("has both token and env; one of them is the secret")
    rest = {name: part for name, part in value.items() if name != "env"}
    return {"token": {"env": value["env"]}, **rest}


def _enrolment_tokens(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of tokens")
    return tuple(
        part if isinstance(part, EnrolmentTokenConfig) else _with_token(part) for part in value
    )


def _admin_tokens(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        raise ValueError("must be a list of mappings with token (or env), name and role")
    return tuple(
        part if isinstance(part, AdminTokenConfig) else _with_token(part) for part in value
    )


class AuthConfig(Spec):
    """Authentication. A token is text, or ``{env: NAME}`` to read it from the environment.

    Attributes:
        admin_tokens: Tokens of more users, with their roles. Without any admin token, the
            administrative routes are disabled.
    """

    enrolment_tokens: Annotated[
        tuple[EnrolmentTokenConfig, ...], BeforeValidator(_enrolment_tokens)
    ] = ()
    admin_token: Token | None = None
    admin_tokens: Annotated[tuple[AdminTokenConfig, ...], BeforeValidator(_admin_tokens)] = ()

    @model_validator(mode="after")
    def _check_apart(self) -> Self:
        devices = [token.token for token in self.enrolment_tokens]
        people = [person.token for person in self.admin_tokens]
        if self.admin_token in devices:
            raise ValueError("admin_token must not be one that devices enrol with")
        if self.admin_token is not None:
            people.append(self.admin_token)
        if _distinct(devices) < len(devices):
            raise ValueError("enrolment_tokens: two of them are the same")
        if _distinct(people) < len(people):
            raise ValueError("admin_tokens: two of them are the same")
        if _distinct(devices + people) < len(devices) + len(people):
            raise ValueError("admin_tokens: must not be one that devices enrol with")
        return self

    @property
    def guessable(self) -> list[str]:
        """Return the keys of tokens that are too short or too regular to be secure."""
        tokens = {
            f"enrolment_tokens.{at}": one.token for at, one in enumerate(self.enrolment_tokens)
        }
        if self.admin_token is not None:
            tokens["admin_token"] = self.admin_token
        tokens |= {f"admin_tokens.{at}": one.token for at, one in enumerate(self.admin_tokens)}
        return [key for key, token in tokens.items() if _is_guessable(token.get_secret_value())]

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for `Authority` or `Aggregator`."""
        admin = self.admin_token
        return {
            "enrolment_tokens": [token.build() for token in self.enrolment_tokens],
            "admin_token": None if admin is None else admin.get_secret_value(),
            "admin_tokens": [person.build() for person in self.admin_tokens],
        }


def _is_guessable(secret: str) -> bool:
    return len(secret) < _FEWEST_CHARS or len(set(secret)) < _FEWEST_DIFFERENT


def _distinct(secrets: Iterable[SecretStr]) -> int:
    return len({secret.get_secret_value() for secret in secrets})
