"""`auth` of CONFIG.yaml: validation, without tokens in errors."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.aggregator.authority import Authority, digest
from fedone_sdk.errors import SpecError
from fedone_sdk.spec import validate_spec


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_FLEET", "fleet-secret")
    monkeypatch.setenv("TEST_ROOT", "root-secret")
    monkeypatch.delenv("NOPE", raising=False)


def config_of(document: Any) -> Authority:
    return validate_spec(Authority, document, source="c.yaml")


def test_tokens_are_text_or_mappings() -> None:
    config = config_of(
        {
            "enrolment_tokens": [
                "plain-secret",
                {"env": "TEST_FLEET"},
                {
                    "token": "acme-secret",
                    "name": "acme",
                    "runs": ["acme-*"],
                    "expires": "2030-01-02T03:04:05+01:00",
                    "uses": 3,
                },
                {"env": "TEST_ROOT", "name": "other"},
            ],
            "admin_tokens": [
                {"token": "ops-secret", "name": "ops", "role": "operator", "runs": ["acme-*"]},
                {"token": {"env": "PATH"}, "name": "path", "role": "viewer"},
            ],
        }
    )
    plain, fleet, acme, other = config.enrolment_tokens
    assert (plain.token_sha256, plain.name, plain.runs) == (digest("plain-secret"), None, None)
    assert fleet.token_sha256 == digest("fleet-secret")
    assert (acme.name, acme.runs, acme.uses) == ("acme", ("acme-*",), 3)
    assert acme.record("acme", 0).expires_at == 1893549845
    assert (other.token_sha256, other.name) == (digest("root-secret"), "other")
    assert config.check("ops-secret", "operator").runs == ("acme-*",)
    assert "secret" not in repr(config).replace("SecretStr", "")


def test_the_admin_token_is_a_person_of_role_admin() -> None:
    config = config_of({"admin_token": {"env": "TEST_ROOT"}})
    assert config.check("root-secret", "admin").name == "admin_token"


_ADMIN = {"token": "s3cret", "name": "a", "role": "admin"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"enrolment_tokens": "s3cret"}, "enrolment_tokens: must be a list of tokens"),
        ({"enrolment_tokens": [7]}, "enrolment_tokens.0.token: must be a token in quotes"),
        ({"enrolment_tokens": ["a s3cret"]}, "enrolment_tokens.0: must be printable ASCII"),
        ({"enrolment_tokens": [{"env": "NOPE"}]}, "the environment variable NOPE is not set"),
        ({"enrolment_tokens": [{"token": "s3cret", "env": "TEST_FLEET"}]}, "either token or env"),
        ({"enrolment_tokens": [{"token": "s3cret", "nmae": "a"}]}, "enrolment_tokens.0.nmae: "),
        ({"enrolment_tokens": [{"token": "s3cret", "name": "a:b"}]}, "enrolment_tokens.0.name: "),
        ({"enrolment_tokens": [{"token": "s3cret", "runs": "acme"}]}, "must be a list of names"),
        ({"enrolment_tokens": [{"token": "s3cret", "runs": ["a/b"]}]}, "a pattern of runs is"),
        ({"enrolment_tokens": [{"token": "s3cret", "expires": "2030-01-02T03:04:05"}]},
         "expires: "),
        ({"enrolment_tokens": ["s3cret", "s3cret"]}, "_tokens: two tokens have the same secret"),
        ({"enrolment_tokens": ["s3cret"], "admin_tokens": [_ADMIN]}, "not also be an enrolment"),
        ({"admin_token": "s3cret", "admin_tokens": [_ADMIN]}, "s: two tokens have the same secret"),
        ({"admin_tokens": ["s3cret"]}, "admin_tokens.0.name: is required"),
        ({"admin_tokens": {"a": "s3cret"}}, "admin_tokens: must be a list of mappings"),
        ({"admin_tokens": [{"token": "s3cret", "name": "a", "role": "admin", "runs": ["b"]}]},
         "runs: cannot limit role admin"),
    ],
)  # fmt: skip
def test_errors_do_not_contain_the_token(document: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        config_of(document)
    assert message in str(caught.value)
    assert "s3cret" not in str(caught.value)
