"""Who a device is to one server."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from pathlib import Path

import structlog

from fedone_sdk.client.shelf import StateDir
from fedone_sdk.messages import Enrolled, is_sendable

__all__ = ["Identity", "shelf_of"]

_log = structlog.get_logger(__name__)

_FILE = "identity.json"


def shelf_of(state_dir: str | Path | None, server: str) -> StateDir:
    """Where a device keeps what concerns one server; None keeps it in memory.

    Args:
        state_dir: The app's folder for the SDK.
        server: The server's URL or name.
    """
    if state_dir is None:
        return StateDir(None)
    return StateDir(Path(state_dir) / hashlib.sha256(server.encode()).hexdigest()[:16])


class Identity:
    """Credential, enrolment nonce and signing key, kept across restarts.

    A damaged file is put aside, and the device enrols again.

    Args:
        shelf: Keeps it.
        server: The server that it is for; stands in the file for people.

    Attributes:
        server: As given.
        client_id: The device's public name; None until it has enrolled.
        credential: Its secret; None until it has enrolled.
        private_key: Signs its requests; None where it does not sign.
    """

    def __init__(self, shelf: StateDir, server: str) -> None:
        self._shelf = shelf
        self.server = server
        self._nonce: str | None = None
        self.client_id: str | None = None
        self.credential: str | None = None
        self.private_key: str | None = None
        content = shelf.read(_FILE)
        if content is not None:
            self._load(content)

    def __repr__(self) -> str:
        return f"Identity(server={self.server!r}, client_id={self.client_id!r})"

    def _load(self, content: bytes) -> None:
        try:
            kept = json.loads(content)
            found = [kept[name] for name in ("client_id", "credential", "nonce", "private_key")]
            if not all(value is None or isinstance(value, str) for value in found):
                raise TypeError("not text")
            if found[1] is not None and not is_sendable(found[1]):
                raise ValueError("not a credential")
            if found[3] is not None and len(base64.b64decode(found[3], validate=True)) != 32:
                raise ValueError("not a key")
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            _log.warning("damaged identity put aside", file=_FILE, error=type(exc).__name__)
            self._shelf.write(f"{_FILE}.damaged", content)
            self._shelf.remove(_FILE)
            return
        self.client_id, self.credential, self._nonce, self.private_key = found

    def _save(self) -> None:
        document = {
            "server": self.server,
            "client_id": self.client_id,
            "credential": self.credential,
            "nonce": self._nonce,
            "private_key": self.private_key,
        }
        self._shelf.write(_FILE, json.dumps(document).encode())

    def nonce(self, private_key: str | None) -> str:
        """The secret to enrol with, kept before it is used.

        Sent again with it, after an answer that was lost or a restart, the enrolment gives the
        same client.

        Args:
            private_key: Signs the requests of the client that enrols; None where it does not.
        """
        if self._nonce is None or self.private_key != private_key:
            self._nonce = secrets.token_urlsafe(32)
            self.private_key = private_key
            self._save()
        return self._nonce

    def begin(self, nonce: str) -> None:
        """Keeps a nonce of the caller's to enrol with, unless there is one or an identity.

        Args:
            nonce: For a client that does not sign its requests.
        """
        if self._nonce is None and self.credential is None:
            self._nonce = nonce
            self._save()

    def enrolled(self, message: Enrolled) -> None:
        """Keeps a new identity."""
        self.client_id, self._nonce = message.client_id, None
        self.renew(message.credential)

    def renew(self, credential: str) -> None:
        """Keeps another credential of the same client; it is written before it is used."""
        self.credential = credential
        self._save()

    def forget(self) -> None:
        """Forgets an identity that the server does not know any more."""
        self.client_id = self.credential = self.private_key = self._nonce = None
        self._save()
