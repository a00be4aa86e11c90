"""Construction of the edge clients of a federation in one process."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fedone_sdk.client import EdgeClient, Hooks, Network, Transport
from fedone_sdk.client.state import DeviceState, Identity
from fedone_sdk.errors import DataError
from fedone_sdk.files import replace_file
from fedone_sdk.task import Example, ScoreFunction

Between = Callable[[int, Transport], Transport]
"""Wraps the transport of client number k; returns the transport that the client uses."""

_SERVER = "simulation"
"""The aggregator's name in the clients' state files: its URL changes at every start."""

_SECRET = "enrolment-secret"
"""The file with the secret that enrolment nonces derive from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The clients of a federation, one per shard.

    Attributes:
        score: The user's function, for loss ``score``.
        state_dir: Holds one state folder per client; None keeps state in memory.
        between: Wraps each client's transport; None leaves it as it is.
    """

    shards: Sequence[Sequence[Example]]
    token: str
    score: ScoreFunction | None = None
    state_dir: Path | None = None
    between: Between | None = None

    def __len__(self) -> int:
        return len(self.shards)

    def nonces(self) -> tuple[str, ...]:
        """Return each client's enrolment nonce; with `state_dir`, the same at every start.

        An enrolment with the same nonce returns the same client, so a client needs no state folder
        before its first assignment.
        """
        secret = secrets.token_bytes(32) if self.state_dir is None else _secret(self.state_dir)
        digests = (hashlib.sha256(secret + b"%d" % number) for number in range(len(self)))
        return tuple(
            base64.urlsafe_b64encode(found.digest()).decode().rstrip("=") for found in digests
        )

    def client(self, number: int, line: Transport, nonce: str) -> EdgeClient:
        """Create a client."""
        if self.state_dir is not None:
            with closing(DeviceState(self._folder(number), _SERVER)) as state:
                Identity(state).begin(nonce)
        return EdgeClient(
            _SERVER,
            token=self.token,
            data=self.shards[number],
            state_dir=self._folder(number),
            hooks=Hooks(score=self.score),
            network=Network(transport=line if self.between is None else self.between(number, line)),
        )

    def credential(self, number: int) -> str | None:
        """Return the credential in a client's state folder; None if there is none."""
        folder = self._folder(number)
        if folder is None or not folder.is_dir():
            return None
        with closing(DeviceState(folder, _SERVER)) as state:
            return Identity(state).credential

    def _folder(self, number: int) -> Path | None:
        return None if self.state_dir is None else self.state_dir / str(number)


def _secret(folder: Path) -> bytes:
    file = folder / _SECRET
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists() or not file.read_bytes():
            replace_file(file, secrets.token_bytes(32), mode=0o600)
        return file.read_bytes()
    except OSError as exc:
        raise DataError(f"{folder}: cannot be used as a state folder: {exc}") from exc
