"""Signed requests: the vectors for other languages, and refused signatures."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.aggregator.access.signing import Signatures, SignedRequest
from fedone_sdk.client.signing import Signer
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages.signature import content_digest, signature_base
from fedone_sdk.stores import ClientRecord, MemoryStore
from fedone_sdk.testing import ManualClock

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "signatures.json").read_text(encoding="utf-8")
)
CLIENT_ID = VECTORS["client_id"]
HEADERS = [value.encode() for value in VECTORS["requests"][0]["headers"].values()]
BODY = b'{"num_examples":32}'
TARGET = "/v1/assignments/claim?a=1"


def client_of(signer: Signer | None) -> ClientRecord:
    return ClientRecord(
        index=0,
        client_id=CLIENT_ID,
        credential_sha256="",
        enrolled_at=0,
        public_key=None if signer is None else signer.public_key,
    )


def request_of(headers: dict[str, str], **changes: Any) -> SignedRequest:
    request = SignedRequest(
        method="POST",
        target=TARGET,
        body=BODY,
        headers={name.lower(): (value,) for name, value in headers.items()},
    )
    return replace(request, **changes)


class Checked:
    """A server with one client, and that client's signer."""

    def __init__(self) -> None:
        self.clock = ManualClock(1_700_000_000.5)
        self.store = MemoryStore()
        self.signatures = Signatures(self.store, self.clock, window_s=300)
        self.signer = Signer.generate()
        self.client = client_of(self.signer)

    def headers(self, *, now: float | None = None, **changes: Any) -> dict[str, str]:
        known: dict[str, Any] = {"client_id": CLIENT_ID, "now": now or self.clock.now()}
        return self.signer.headers("POST", TARGET, BODY, **{**known, **changes})

    async def refused(self, request: SignedRequest, client: ClientRecord | None = None) -> str:
        with pytest.raises(ProblemError) as caught:
            await self.signatures.check(client or self.client, request)
        return f"{caught.value.code}: {caught.value.detail}"


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda vector: str(vector["name"]))
class TestVectors:
    def test_they_are_signed_so(self, vector: dict[str, Any]) -> None:
        signer = Signer(VECTORS["private_key"])
        assert signer.public_key == VECTORS["public_key"]
        headers = signer.headers(
            vector["method"],
            vector["target"],
            vector["body"].encode(),
            client_id=CLIENT_ID,
            now=vector["created"],
            nonce=vector["nonce"],
        )
        assert headers == vector["headers"]

    def test_the_base_is_as_the_rfc_says(self, vector: dict[str, Any]) -> None:
        """Written down once more, from the text of RFC 9421 and not from our code."""
        path, mark, query = vector["target"].partition("?")
        params = (
            '("@method" "@path" "@query" "content-digest")'
            f';created={vector["created"]};keyid="{CLIENT_ID}";nonce="{vector["nonce"]}"'
            ';alg="ed25519"'
        )
        lines = [
            f'"@method": {vector["method"]}',
            f'"@path": {path}',
            f'"@query": {mark or "?"}{query}',
            f'"content-digest": {vector["headers"]["Content-Digest"]}',
            f'"@signature-params": {params}',
        ]
        assert vector["signature_base"] == "\n".join(lines)
        assert vector["headers"]["Signature-Input"] == f"fedone={params}"
        key = Ed25519PrivateKey.from_private_bytes(base64.b64decode(VECTORS["private_key"]))
        signature = base64.b64encode(key.sign("\n".join(lines).encode())).decode()
        assert vector["headers"]["Signature"] == f"fedone=:{signature}:"

    async def test_they_are_accepted_once(self, vector: dict[str, Any]) -> None:
        checked = Checked()
        client = replace(checked.client, public_key=VECTORS["public_key"])
        request = request_of(
            vector["headers"],
            method=vector["method"],
            target=vector["target"],
            body=vector["body"].encode(),
        )
        await checked.signatures.check(client, request)
        assert await checked.refused(request, client) == (
            "invalid_signature: this nonce was used before"
        )


def test_a_digest_is_that_of_rfc_9530() -> None:
    # RFC 9530, appendix B.2: a body of {"hello": "world"} and a line feed.
    assert content_digest(b'{"hello": "world"}\n') == (
        "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
    )


class TestTampering:
    @pytest.mark.parametrize(
        "changes",
        [
            {"method": "PUT"},
            {"target": "/v1/assignments/claim?a=2"},
            {"target": "/v1/assignments/claim"},
            {"target": "/v1/assignments/other?a=1"},
            {"target": "/v1/assignments/cl%61im?a=1"},
            {"target": "/v1/assignments/claim?a=1\u00e9"},
        ],
    )
    async def test_what_was_signed_cannot_be_changed(self, changes: dict[str, Any]) -> None:
        checked = Checked()
        detail = await checked.refused(request_of(checked.headers(), **changes))
        assert detail.startswith("invalid_signature: the ")

    @pytest.mark.parametrize("body", [b"", BODY + b" ", b'{"num_examples":33}'])
    async def test_the_body_is_the_one_signed(self, body: bytes) -> None:
        checked = Checked()
        headers = checked.headers()
        assert await checked.refused(request_of(headers, body=body)) == (
            "invalid_signature: Content-Digest is not the sha-256 of the body"
        )
        headers["Content-Digest"] = content_digest(body)
        assert "is not the client's over this request" in await checked.refused(
            request_of(headers, body=body)
        )

    @pytest.mark.parametrize(
        ("was", "becomes"),
        [
            ("created=1700000000", "created=1700000001"),
            ('nonce="nonce-of-16-chars"', 'nonce="other-of-16-chars"'),
            (';alg="ed25519"', ';alg="hmac-sha256"'),
            (';alg="ed25519"', ""),
            (';alg="ed25519"', ';alg="ed25519";alg="ed25519"'),
            (';alg="ed25519"', ';alg="ed25519";expires=1'),
            ('"content-digest"', '"content-type"'),
            (' "content-digest"', ""),
            ("fedone=", "sig1="),
            ('nonce="nonce-of-16-chars"', 'nonce=""'),
            ('nonce="nonce-of-16-chars"', "nonce=12345678901234"),
            ("created=1700000000", 'created="now"'),
            ("created=1700000000", "created=99999999999999999999"),
        ],
    )
    async def test_parameters_are_signed_too(self, was: str, becomes: str) -> None:
        checked = Checked()
        headers = checked.headers(nonce="nonce-of-16-chars")
        assert was in headers["Signature-Input"]
        headers["Signature-Input"] = headers["Signature-Input"].replace(was, becomes)
        assert (await checked.refused(request_of(headers))).startswith("invalid_signature: ")

    @pytest.mark.parametrize("name", ["Content-Digest", "Signature-Input", "Signature"])
    async def test_each_header_stands_there_once(self, name: str) -> None:
        checked = Checked()
        request = request_of(checked.headers())
        for values in [(), request.headers[name.lower()] * 2, ("",), ("fedone=:AAAA:",)]:
            changed = {**request.headers, name.lower(): values}
            detail = await checked.refused(replace(request, headers=changed))
            assert detail.startswith("invalid_signature: ")

    async def test_another_key_is_refused(self) -> None:
        checked = Checked()
        other = replace(checked.client, public_key=Signer.generate().public_key)
        assert "is not the client's" in await checked.refused(request_of(checked.headers()), other)

    @pytest.mark.parametrize("public_key", ["A" * 43 + "=", "AQ" + "A" * 41 + "=", "no key"])
    async def test_a_key_that_is_none_signs_nothing(self, public_key: str) -> None:
        checked = Checked()
        client = replace(checked.client, public_key=public_key)
        assert "is not the client's" in await checked.refused(request_of(checked.headers()), client)

    async def test_a_client_cannot_sign_for_another(self) -> None:
        checked = Checked()
        headers = checked.headers(client_id="client-other")
        assert "keyid is not the client" in await checked.refused(request_of(headers))

    async def test_a_client_without_a_key_cannot_sign(self) -> None:
        checked = Checked()
        assert "enrolled without a public key" in await checked.refused(
            request_of(checked.headers()), client_of(None)
        )


class TestTime:
    @pytest.mark.parametrize("off", [-299, 0, 299])
    async def test_clocks_may_differ_a_little(self, off: float) -> None:
        checked = Checked()
        headers = checked.headers(now=checked.clock.now() + off)
        await checked.signatures.check(checked.client, request_of(headers))

    @pytest.mark.parametrize("off", [-302, 302, -1e9])
    async def test_a_wrong_clock_is_reported(self, off: float) -> None:
        checked = Checked()
        headers = checked.headers(now=checked.clock.now() + off)
        assert (await checked.refused(request_of(headers))).startswith("clock_skew: ")

    @pytest.mark.parametrize("off", [-299, 299])
    async def test_a_request_is_good_once_for_as_long_as_its_time_is(self, off: float) -> None:
        checked = Checked()
        request = request_of(checked.headers(now=checked.clock.now() + off))
        await checked.signatures.check(checked.client, request)
        codes = set()
        for _ in range(700):
            codes.add((await checked.refused(request)).partition(":")[0])
            checked.clock.advance(1)
        assert codes == {"invalid_signature", "clock_skew"}

    async def test_unknown_callers_fill_no_store_and_see_no_time(self) -> None:
        checked = Checked()
        stranger = Signer.generate()
        for off in (0, 10_000):
            headers = stranger.headers(
                "POST", TARGET, BODY, client_id=CLIENT_ID, now=checked.clock.now() + off
            )
            assert (await checked.refused(request_of(headers))).startswith("invalid_signature: ")
        assert checked.store._nonces == {}

    async def test_nonces_are_each_client_s_own(self) -> None:
        checked = Checked()
        headers = checked.headers(nonce="nonce-of-16-chars")
        await checked.signatures.check(checked.client, request_of(headers))
        other = Signer.generate()
        client = replace(client_of(other), client_id="client-other")
        headers = other.headers(
            "POST",
            TARGET,
            BODY,
            client_id="client-other",
            now=checked.clock.now(),
            nonce="nonce-of-16-chars",
        )
        await checked.signatures.check(client, request_of(headers))


def test_a_signer_keeps_its_key_to_itself() -> None:
    signer = Signer.generate()
    assert signer.private_key not in repr(signer)
    assert Signer(signer.private_key).public_key == signer.public_key
    for bad in ("", "AAAA", "?" * 44):
        with pytest.raises(ValueError, match="32 bytes in base64"):
            Signer(bad)


def test_a_target_without_a_path_is_the_root() -> None:
    assert b'"@path": /\n"@query": ?\n' in signature_base("GET", "", "d", "p")


class TestNonsense:
    @given(
        st.dictionaries(
            st.sampled_from(["content-digest", "signature-input", "signature"]),
            st.lists(st.binary(max_size=80) | st.sampled_from(HEADERS), max_size=2),
        )
    )
    def test_no_header_breaks_it(self, given_headers: dict[str, list[bytes]]) -> None:
        # As aiohttp hands them over: bytes that are no text are lone surrogates.
        headers = {
            name: tuple(value.decode("utf-8", "surrogateescape") for value in values)
            for name, values in given_headers.items()
        }
        checked = Checked()
        request = replace(request_of({}), headers=headers)
        detail = asyncio.run(checked.refused(request))
        assert detail.startswith("invalid_signature: ")
