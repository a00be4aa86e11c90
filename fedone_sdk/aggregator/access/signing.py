"""Signed requests: a stolen credential is useless without the device's private key."""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedone_sdk.clock import Clock
from fedone_sdk.errors import ProblemError, needs_extra
from fedone_sdk.messages.signature import COVERED, SIGNATURE_LABEL, content_digest, signature_base
from fedone_sdk.stores import ClientRecord, Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_COMPONENTS = "(" + " ".join(f'"{name}"' for name in COVERED) + ")"
_INPUT = re.compile(
    rf"{SIGNATURE_LABEL}=({re.escape(_COMPONENTS)}((?:;[a-z]+=(?:[0-9]{{1,15}}|\"[!#-\[\]-~]*\"))*))"
)
_PARAMETER = re.compile(r';([a-z]+)=(?:([0-9]+)|"([^"]*)")')
_SIGNATURE = re.compile(rf"{SIGNATURE_LABEL}=:([A-Za-z0-9+/]{{86}}==):")
_NONCE = re.compile(r"[A-Za-z0-9_-]{16,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """The signed parts of a request.

    Attributes:
        method: HTTP method.
        target: Path and query of the request line.
        body: The raw body.
        headers: Lower-case name -> values, one per header line.
    """

    method: str
    target: str
    body: bytes
    headers: Mapping[str, Sequence[str]]


class Signatures:
    """Verifies signatures and rejects replays.

    Args:
        store: Store of used nonces, shared by all replicas.
        clock: Source of the current time.
        window_s: Maximal difference of a signature's time, seconds.
    """

    def __init__(self, store: Store, clock: Clock, *, window_s: float) -> None:
        self._store = store
        self._clock = clock
        self._window_s = window_s

    async def check(self, client: ClientRecord, request: SignedRequest) -> None:
        """Refuse a request without a valid, recent and unused signature of the client.

        Raises:
            ProblemError: ``invalid_signature``; ``clock_skew`` if only the time is wrong.
        """
        if client.public_key is None:
            raise _refused("this client enrolled without a public key, and requests must be signed")
        params, values = _parameters(_only(request, "signature-input"))
        digest = _only(request, "content-digest")
        if not hmac.compare_digest(
            digest.encode("utf-8", "surrogateescape"), content_digest(request.body).encode()
        ):
            raise _refused("Content-Digest is not the sha-256 of the body")
        if values["keyid"] != client.client_id:
            raise _refused("keyid is not the client that the credential belongs to")
        signature = _SIGNATURE.fullmatch(_only(request, "signature"))
        if signature is None:
            raise _refused(f"Signature is not {SIGNATURE_LABEL}=:<64 bytes in base64>:")
        if not request.target.isascii():
            raise _refused("the path is not ASCII")
        signed = signature_base(request.method, request.target, digest, params)
        if not _is_signed(client.public_key, base64.b64decode(signature[1]), signed):
            raise _refused("the signature is not the client's over this request")
        # After the signature check: unauthenticated callers must not fill the store with nonces or
        # learn the time window.
        now, created = self._clock.now(), int(values["created"])
        if abs(now - created) > self._window_s:
            raise ProblemError(
                "clock_skew",
                f"the signature's time is {created - now:+.0f} s off, more than "
                f"{self._window_s:g} s; the Date header tells the server's time",
            )
        nonce = f"{client.client_id}:{values['nonce']}"
        if not await self._store.use_nonce(nonce, now, created + self._window_s + 1):
            raise _refused("this nonce was used before")


def _parameters(header: str) -> tuple[str, dict[str, str]]:
    """Return the text after the label and its parameters."""
    found = _INPUT.fullmatch(header)
    if found is None:
        raise _refused(f"Signature-Input is not {SIGNATURE_LABEL}={_COMPONENTS};created=...")
    pairs = _PARAMETER.findall(found[2])
    values = {name: number or text for name, number, text in pairs}
    if len(values) < len(pairs) or values.keys() != {"created", "keyid", "nonce", "alg"}:
        raise _refused("Signature-Input must have created, keyid, nonce and alg, once each")
    if values["alg"] != "ed25519":
        raise _refused("alg must be ed25519")
    if not values["created"].isdigit():
        raise _refused("created must be whole seconds since the epoch")
    if _NONCE.fullmatch(values["nonce"]) is None:
        raise _refused("nonce must be 16 to 64 letters, digits, dashes and underscores")
    return found[1], values


def _only(request: SignedRequest, header: str) -> str:
    values = request.headers.get(header, ())
    if len(values) != 1:
        raise _refused(f"a signed request has one {header} header, not {len(values)}")
    return values[0].strip()


def _is_signed(public_key: str, signature: bytes, signed: bytes) -> bool:
    with needs_extra("signed requests", "server"):
        from cryptography.exceptions import InvalidSignature
    try:
        _key(public_key).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def _key(public_key: str) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(public_key, validate=True))
    except binascii.Error as exc:
        raise ValueError("the public key is not base64") from exc


def _refused(why: str) -> ProblemError:
    return ProblemError("invalid_signature", why)
