"""What the clients of a federation in one process are made of."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedone_sdk.client import EdgeClient, Trainer, Transport
from fedone_sdk.client.identity import Identity, shelf_of
from fedone_sdk.client.shelf import Shelf
from fedone_sdk.task import Example, ScoreFunction

__all__ = ["Between", "Devices"]

Between = Callable[[int, Transport], Transport]
"""What stands between client number k and the aggregator, given what reaches that."""

_SERVER = "simulation"
"""The aggregator's name in the clients' state: its URL is another one at the next start."""

_SECRET = "enrolment-secret"
"""The file that the clients' enrolment nonces derive from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The clients of a federation, one for each shard.

    Attributes:
        shards: Each client's examples.
        token: Lets them enrol.
        trainer: Trains the soft prompts of white-box methods.
        score: The user's function, for loss ``score``.
        state_dir: Where each keeps its state, in a folder of its own; None keeps it in memory.
        between: What stands between a client and the aggregator; None is nothing.
    """

    shards: Sequence[Sequence[Example]]
    token: str
    trainer: Trainer | None = None
    score: ScoreFunction | None = None
    state_dir: Path | None = None
    between: Between | None = None

    def __len__(self) -> int:
        return len(self.shards)

    def nonces(self) -> tuple[str, ...]:
        """What each client enrols with: the same at every start where a folder keeps state.

        Enrolled again with its nonce, a client is the same one, so a client needs no folder
        before it has had work.

        Raises:
            DataError: The folder cannot be made.
        """
        shelf = Shelf(self.state_dir)
        secret = shelf.read(_SECRET)
        if not secret:
            secret = secrets.token_bytes(32)
            shelf.write(_SECRET, secret)
        digests = (hashlib.sha256(secret + b"%d" % number) for number in range(len(self)))
        return tuple(
            base64.urlsafe_b64encode(found.digest()).decode().rstrip("=") for found in digests
        )

    def client(self, number: int, line: Transport, nonce: str) -> EdgeClient:
        """Makes a client.

        Args:
            number: Which one.
            line: Reaches the aggregator.
            nonce: Enrols it where it has no identity.
        """
        if self.state_dir is not None:
            Identity(shelf_of(self._folder(number), _SERVER), _SERVER).begin(nonce)
        return EdgeClient(
            _SERVER,
            token=self.token,
            data=self.shards[number],
            trainer=self.trainer,
            score=self.score,
            state_dir=self._folder(number),
            transport=line if self.between is None else self.between(number, line),
        )

    def credential(self, number: int) -> str | None:
        """The credential that a client keeps in its folder; None where it has none."""
        folder = self._folder(number)
        if folder is None or not folder.is_dir():
            return None
        return Identity(shelf_of(folder, _SERVER), _SERVER).credential

    def _folder(self, number: int) -> Path | None:
        return None if self.state_dir is None else self.state_dir / str(number)
