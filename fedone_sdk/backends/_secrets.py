"""Keeps keys out of what servers say: it goes into errors, logs, reports and to devices."""

from __future__ import annotations

import os
import re

__all__ = ["without_secrets"]

_NAME = re.compile(r"(?i)(^|_)(api_?keys?|keys?|tokens?|secrets?|credentials?)(_|$)|passw")
_LEAST_CHARS = 8
_SHAPE = re.compile(
    r"(?i:\bbearer\s+)(?=\S*\d)[^\s\"',;]+"
    r"|\b(?i:(?:sk|pk|rk|gsk|xai)[-_]|hf_)[^\s\"',;]{6,}"
    r"|(?i:\b(?:api[-_ ]?key|token|password|secret)\s*[=:]\s*)[^\s\"',;]{6,}"
    r"|(?<=://)[^\s/@]+(?=@)"
)


def without_secrets(text: str, key_env: str | None = None) -> str:
    """A text without keys: a server may repeat the one that it was sent.

    Args:
        text: What a server says.
        key_env: Environment variable that holds the key it was sent, whatever its name and form;
            those with a secret's name are looked at in any case, and so is what looks like a key.
    """
    secrets = {
        value.strip() for name, value in os.environ.items() if name == key_env or _NAME.search(name)
    }
    # The longest first: one may be the beginning of another.
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _LEAST_CHARS:
            text = text.replace(secret, "[removed]")
    return _SHAPE.sub("[removed]", text)
