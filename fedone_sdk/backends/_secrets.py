"""Reading of keys, and their removal from servers' messages.

Servers' messages appear in errors, logs and reports, and are sent to devices.
"""

from __future__ import annotations

import os
import re

from fedone_sdk.errors import SpecError
from fedone_sdk.messages import is_sendable

_NAME = re.compile(r"(?i)(^|_)(api_?keys?|keys?|tokens?|secrets?|credentials?)(_|$)|passw")
_LEAST_CHARS = 8
_SHAPE = re.compile(
    r"(?i:\bbearer\s+)(?=\S*\d)[^\s\"',;]+"
    r"|\b(?i:(?:sk|pk|rk|gsk|xai)[-_]|hf_)[^\s\"',;]{6,}"
    r"|(?i:\b(?:api[-_ ]?key|token|password|secret)\s*[=:]\s*)[^\s\"',;]{6,}"
    r"|(?<=://)[^\s/@]+(?=@)"
)


def read_secret(option: str, env: str, *, unset: str) -> str:
    """Return the secret in the environment variable that an option names.

    Raises:
        SpecError: It is not set, with the advice `unset`; or a header cannot carry its value, which
            the error does not show.
    """
    # A newline at the end of a secret's file is common, and not allowed in a header.
    secret = os.environ.get(env, "").strip()
    if not secret:
        raise SpecError(
            f"{option}: the environment variable {env} is not set; {unset}", source="backend"
        )
    if not is_sendable(secret):
        raise SpecError(
            f"{option}: the environment variable {env} holds characters that no key has; "
            "allowed is printable ASCII",
            source="backend",
        )
    return secret


def without_secrets(text: str, key_env: str | None = None) -> str:
    """Remove keys from a server's message, because servers may repeat the key of the request.

    These are the value of `key_env`, those of variables with a secret's name, and text that looks
    like a key.
    """
    secrets = {
        value.strip() for name, value in os.environ.items() if name == key_env or _NAME.search(name)
    }
    # Longest first: one key may be a prefix of another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_CHARS:
            text = text.replace(secret, "[removed]")
    return _SHAPE.sub("[removed]", text)
