"""Request signatures: HTTP Message Signatures (RFC 9421) over a digest of the body (RFC 9530).

One form is supported: ed25519 over method, path, query and body, with time, nonce and client id as
parameters. Proxies do not change these, unlike the host.
"""

from __future__ import annotations

import base64
import hashlib

SIGNATURE_LABEL = "fedone"
"""Label of the signature in its two headers."""

COVERED = ("@method", "@path", "@query", "content-digest")
"""The signed components, in order."""


def content_digest(body: bytes) -> str:
    """Return the header ``Content-Digest`` of a body, which may be empty."""
    encoded = base64.b64encode(hashlib.sha256(body).digest()).decode("ascii")
    return f"sha-256=:{encoded}:"


def signature_base(method: str, target: str, digest: str, params: str) -> bytes:
    """Return the signed bytes (RFC 9421, section 2.5).

    Args:
        method: HTTP method, in capitals.
        target: Path and query of the request line, percent-encoded.
        digest: The header ``Content-Digest``.
        params: The value of ``@signature-params``, as in ``Signature-Input``.
    """
    path, _, query = target.partition("?")
    return (
        f'"@method": {method}\n'
        f'"@path": {path or "/"}\n'
        f'"@query": ?{query}\n'
        f'"content-digest": {digest}\n'
        f'"@signature-params": {params}'
    ).encode("ascii")
