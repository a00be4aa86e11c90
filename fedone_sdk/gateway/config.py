"""CONFIG.yaml of `fedone gateway`: which model, for whom, and how much of it."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from fedone_sdk.aggregator.auth_config import MAKE_A_TOKEN, Token
from fedone_sdk.aggregator.config import Address, host_and_port
from fedone_sdk.aggregator.tls import ServerTls, TlsConfig
from fedone_sdk.budget import Budget, BudgetGuard, SqliteLedger
from fedone_sdk.errors import SpecError
from fedone_sdk.messages import MAX_INPUTS
from fedone_sdk.spec import (
    BackendSpec,
    OnnxSpec,
    RemoteSpec,
    RetrySpec,
    Spec,
    load_yaml,
    validate_spec,
)

__all__ = ["CallerLimits", "GatewayConfig"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def _named(value: object) -> object:
    # Every mistake is a ValueError of our own: pydantic's would print what it was given.
    if not isinstance(value, Mapping):
        raise ValueError("must be a mapping from each caller's name to its token")
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in value):
        raise ValueError("a name is up to 64 letters, digits, dots, dashes and underscores")
    return value


class CallerLimits(Spec):
    """What each caller may ask.

    Attributes:
        client_requests_per_minute: Of one caller; null is no limit. Quotes and checks have as many
            again, each kind.
        max_inputs: The most inputs of one query.
        max_text_chars: The longest input, characters, its reference text included.
    """

    client_requests_per_minute: Annotated[float, Field(gt=0, le=1e9)] | None = None
    max_inputs: Annotated[int, Field(ge=1, le=MAX_INPUTS)] = MAX_INPUTS
    max_text_chars: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000


class GatewayConfig(Spec):
    """What `fedone gateway` does. Relative paths start at the config's folder.

    Attributes:
        listen: ``HOST:PORT``; port 0 picks a free one.
        tls: Certificate; null serves plain HTTP, for loopback or behind a proxy.
        tokens: Each caller's name and token. The name stands in the logs.
        backend: The model. Without ``retry`` of its own it is asked once: callers ask again, and
            their budgets pay. With more attempts, quotes are that many times higher.
        budget: Caps on everything that is asked; null has none.
        ledger: SQLite file that keeps what was spent. Gateways on one machine may share it.
        limits: What each caller may ask.
        generated_text: Whether texts that the model wrote may leave the gateway.
    """

    listen: Address = "127.0.0.1:8090"
    tls: TlsConfig | None = None
    tokens: Annotated[Mapping[str, Token], BeforeValidator(_named)] = Field(default_factory=dict)
    backend: BackendSpec = OnnxSpec()
    budget: Budget | None = None
    ledger: str | None = None
    limits: CallerLimits = CallerLimits()
    generated_text: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.tokens:
            raise ValueError(
                f"tokens: needs at least one, or nobody can ask; make one with: {MAKE_A_TOKEN}"
            )
        if len({token.get_secret_value() for token in self.tokens.values()}) < len(self.tokens):
            raise ValueError("tokens: two callers share one token")
        if self.budget is not None:
            if self.ledger is None:
                raise ValueError("ledger: is required with a budget, which must outlive a restart")
            if self.budget.queries is not None:
                raise ValueError(
                    "budget.queries: queries are counted by who asks; cap requests, tokens or usd"
                )
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a CONFIG.yaml.

        Raises:
            SpecError: One line per mistake: file, key, what is allowed; never a token.
        """
        return validate_spec(cls, load_yaml(path), source=str(path))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        return host_and_port(self.listen)

    @property
    def exposed(self) -> bool:
        """Whether tokens would cross a network in plain text."""
        host, _ = self.address
        try:
            local = ip_address(host).is_loopback
        except ValueError:
            local = host == "localhost"
        return self.tls is None and not local

    @property
    def model(self) -> BackendSpec:
        """The backend, which is asked once unless it says otherwise."""
        spec = self.backend
        if not isinstance(spec, RemoteSpec) or "retry" in spec.model_fields_set:
            return spec
        return spec.model_copy(update={"retry": RetrySpec(attempts=1)})

    @property
    def attempts(self) -> int:
        """The most attempts at one request."""
        spec = self.model
        return spec.retry.attempts if isinstance(spec, RemoteSpec) else 1

    def secrets(self) -> dict[str, str]:
        """The callers' tokens by name."""
        return {name: token.get_secret_value() for name, token in self.tokens.items()}

    def server_tls(self, folder: Path) -> ServerTls | None:
        """What serves ``https``, if it is configured.

        Raises:
            SpecError: The files cannot be used.
        """
        return None if self.tls is None else self.tls.open(folder)

    def ledger_in(self, folder: Path) -> Path:
        """The file of `ledger`, which is set."""
        return folder / Path(self.ledger or "").expanduser()

    def build_guard(self, folder: Path) -> BudgetGuard | None:
        """What pays for everything that is asked, if there is a ledger.

        Raises:
            SpecError: The ledger cannot be used.
        """
        if self.ledger is None:
            return None
        path = self.ledger_in(folder)
        try:
            ledger = SqliteLedger(path, program="fedone gateway")
        except sqlite3.Error as exc:
            raise SpecError(f"ledger: {path}: cannot be used: {exc}") from exc
        return BudgetGuard(self.budget, ledger=ledger, name="gateway")
