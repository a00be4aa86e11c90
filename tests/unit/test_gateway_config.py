"""The config of `fedone gateway`: what is allowed, and that no mistake shows a token."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.errors import SpecError
from fedone_sdk.gateway import GatewayConfig
from fedone_sdk.spec import validate_spec

TOKENS = {"alice": "alice-secret", "bob": {"env": "TEST_BOB_TOKEN"}}
OPENAI = {"kind": "openai", "model": "gpt-4o-mini"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BOB_TOKEN", "bob-secret")


def config_of(**changes: Any) -> GatewayConfig:
    return validate_spec(GatewayConfig, {"tokens": TOKENS, **changes}, source="c.yaml")


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "listen: '[::1]:9000'\n"
        "tokens: {alice: alice-secret, bob: {env: TEST_BOB_TOKEN}}\n"
        "backend: {kind: vllm, model: m}\n"
        "budget: {usd: 5, tokens: 1000}\n"
        "ledger: spent.db\n"
        "limits: {client_requests_per_minute: 60, max_inputs: 8, max_text_chars: 500}\n"
        "generated_text: true\n"
    )
    config = GatewayConfig.load(path)
    assert config.address == ("::1", 9000)
    assert config.secrets() == {"alice": "alice-secret", "bob": "bob-secret"}
    assert config.limits.max_inputs == 8
    assert config.generated_text
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens": {}}, "tokens: needs at least one, or nobody can ask; make one with: python3"),
        ({"tokens": ["alice-secret"]}, "tokens: must be a mapping from each caller's name"),
        ({"tokens": "alice-secret"}, "tokens: must be a mapping from each caller's name"),
        ({"tokens": {"a b": "alice-secret"}}, "tokens: a name is up to 64 letters"),
        ({"tokens": {"alice": ["alice-secret"]}}, "tokens.alice: must be a token in quotes"),
        ({"tokens": {"alice": 7}}, "tokens.alice: must be a token in quotes"),
        ({"tokens": {"alice": "a secret"}}, "tokens.alice: a token is printable ASCII"),
        ({"tokens": {"alice": {"env": "NOPE"}}}, "tokens.alice: the environment variable NOPE"),
        ({"tokens": {"a": "secret", "b": "secret"}}, "tokens: two callers share one token"),
        ({"budget": {"requests": 5}}, "ledger: is required with a budget"),
        ({"budget": {"queries": 5}, "ledger": "a.db"}, "budget.queries: queries are counted by"),
        ({"budget": {}, "ledger": "a.db"}, "budget: needs at least one cap"),
        ({"backend": {"kind": "nope"}}, "backend.kind: 'nope' is not one of"),
        ({"limits": {"max_inputs": 0}}, "limits.max_inputs: input should be greater"),
        ({"limits": {"max_inputs": 2000}}, "limits.max_inputs: input should be less"),
        ({"limits": {"rpm": 3}}, "limits.rpm: unknown key (allowed: client_requests_per_minute"),
        ({"listen": "8080"}, "listen: must be HOST:PORT"),
        ({"tls": {"certificate": "a.pem"}}, "tls.key: is required"),
    ],
)
def test_a_mistake_is_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as excinfo:
        config_of(**changes)
    (problem,) = excinfo.value.problems
    assert problem.startswith(told)
    assert "secret" not in problem.replace("secrets.token_urlsafe", "").replace(
        "import secrets", ""
    )


@pytest.mark.parametrize(
    ("changes", "exposed"),
    [
        ({"listen": "127.0.0.1:1"}, False),
        ({"listen": "localhost:1"}, False),
        ({"listen": "[::1]:1"}, False),
        ({"listen": "0.0.0.0:1"}, True),
        ({"listen": "gateway.example:1"}, True),
        ({"listen": "0.0.0.0:1", "tls": {"certificate": "a", "key": "b"}}, False),
    ],
)
def test_plain_text_on_a_network_is_noticed(changes: dict[str, Any], exposed: bool) -> None:
    assert config_of(**changes).exposed is exposed


def test_a_model_is_asked_once_unless_told_otherwise() -> None:
    assert config_of(backend=OPENAI).attempts == 1
    assert (
        config_of(backend=OPENAI).model
        == config_of(backend={**OPENAI, "retry": {"attempts": 1}}).backend
    )
    assert config_of(backend={**OPENAI, "retry": {"attempts": 4}}).attempts == 4
    assert config_of().attempts == 1


async def test_a_ledger_counts_without_a_cap_too(tmp_path: Path) -> None:
    assert config_of().build_guard(tmp_path) is None
    guard = config_of(ledger="spent.db").build_guard(tmp_path)
    assert guard is not None
    assert guard.budget is None
    assert (await guard.account()).spent.requests == 0
    assert (tmp_path / "spent.db").exists()


def test_a_ledger_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "spent.db").write_text("no database at all, and long enough to be looked at" * 9)
    with pytest.raises(SpecError, match=r"ledger: .*spent.db: cannot be used") as excinfo:
        config_of(ledger="spent.db").build_guard(tmp_path)
    assert isinstance(excinfo.value.__cause__, sqlite3.Error)


def test_a_certificate_that_is_not_there(tmp_path: Path) -> None:
    config = config_of(tls={"certificate": "no.pem", "key": "no.key"})
    with pytest.raises(SpecError, match=r"tls: the certificate or key cannot be used"):
        config.server_tls(tmp_path)
    assert config_of().server_tls(tmp_path) is None
