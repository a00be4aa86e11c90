"""Signatures of a device's requests; needs the extra ``signing``."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Self

from fedone_sdk.errors import needs_extra
from fedone_sdk.messages.signature import COVERED, SIGNATURE_LABEL, content_digest, signature_base

with needs_extra("signing requests", "signing"):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class Signer:
    """A device's Ed25519 key, from its raw 32 bytes in base64.

    A signature is valid for one request, once, for some minutes: each attempt has a new one.

    Raises:
        ValueError: It is not such a key.
    """

    def __init__(self, private_key: str) -> None:
        try:
            raw = base64.b64decode(private_key, validate=True)
            self._key = Ed25519PrivateKey.from_private_bytes(raw)
        except (binascii.Error, ValueError):
            # Not chained: the cause may quote the key.
            raise ValueError("a private key is 32 bytes in base64") from None

    @classmethod
    def generate(cls) -> Self:
        """Create a new key."""
        return cls(base64.b64encode(secrets.token_bytes(32)).decode("ascii"))

    @property
    def private_key(self) -> str:
        """The raw private key, base64: a secret like the credential."""
        return base64.b64encode(self._key.private_bytes_raw()).decode("ascii")

    @property
    def public_key(self) -> str:
        """The raw public key, base64, which the device enrols with."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode("ascii")

    def headers(
        self,
        method: str,
        target: str,
        body: bytes,
        *,
        client_id: str,
        now: float,
        nonce: str | None = None,
    ) -> dict[str, str]:
        """Return the headers of one attempt at a request.

        Args:
            method: HTTP method, in capitals.
            target: Path and query as sent.
            body: The bytes of the body; empty for none.
            client_id: The signing client.
            now: The time, seconds since the epoch.
            nonce: 16 to 64 letters, digits, dashes and underscores; random by default.
        """
        components = " ".join(f'"{name}"' for name in COVERED)
        nonce = secrets.token_urlsafe(16) if nonce is None else nonce
        params = (
            f'({components});created={int(now)};keyid="{client_id}";nonce="{nonce}";alg="ed25519"'
        )
        digest = content_digest(body)
        signature = self._key.sign(signature_base(method, target, digest, params))
        encoded = base64.b64encode(signature).decode("ascii")
        return {
            "Content-Digest": digest,
            "Signature-Input": f"{SIGNATURE_LABEL}={params}",
            "Signature": f"{SIGNATURE_LABEL}=:{encoded}:",
        }

    def __repr__(self) -> str:
        """Return a representation without the private key."""
        return f"Signer(public_key={self.public_key!r})"
