"""Records of a store: tokens, clients, runs, closed work, logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedone_sdk.errors import FedOneError


class VersionConflict(FedOneError):
    """The run has another version than expected: another process committed to it."""


class RunDeleted(ValueError):
    """The id is reserved by a deleted run."""


class TokenRefused(FedOneError):
    """An enrolment token is unknown, expired, used up or revoked; the message says which."""


NO_CREDENTIAL = "retired: "
"""In place of a digest: the client was retired and cannot log in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """An enrolment token; the secret itself is never stored.

    Attributes:
        token_sha256: Digest of the secret; unique.
        runs: Patterns of the runs that its clients may access, such as ``acme-*``; None is all.
        uses_left: Number of clients that can still enrol with it; None is unlimited.
        expires_at: Expiry, seconds since the epoch; None is never.
        created_at: Seconds since the epoch.
        revoked_at: Seconds since the epoch; None if it is not revoked.
    """

    name: str
    token_sha256: str
    runs: tuple[str, ...] | None = None
    uses_left: int | None = None
    expires_at: float | None = None
    created_at: float
    revoked_at: float | None = None

    def check(self, now: float) -> None:
        """Refuse a token that was revoked or has expired; a `TokenRefused` has the reason."""
        if self.revoked_at is not None:
            raise TokenRefused("the enrolment token was revoked")
        if self.expires_at is not None and self.expires_at <= now:
            raise TokenRefused("the enrolment token has expired")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRecord:
    """An enrolled client.

    Attributes:
        index: Enrolment index, from 0 without gaps, over which random draws are made; -1 before
            enrolment.
        credential_sha256: Digest of its secret; the secret itself is never stored.
        enrolled_at: Seconds since the epoch.
        enrolment_sha256: Digest of the enrolment's nonce, by which repetitions are recognised; None
            if the device sent none.
        runs: Patterns of the runs that it may access; None is all.
        previous_sha256: Digest of the credential before the last rotation, valid until the new one
            is used, in case the response was lost.
        revoked_at: Seconds since the epoch; None if it is not revoked.
        seen_at: Time of its last request with a precision of a day, seconds since the epoch; None
            if that is less than a day after `enrolled_at`.
    """

    index: int
    client_id: str
    credential_sha256: str
    name: str | None = None
    enrolled_at: float
    enrolment_sha256: str | None = None
    token: str | None = None
    runs: tuple[str, ...] | None = None
    previous_sha256: str | None = None
    revoked_at: float | None = None
    seen_at: float | None = None

    def enrolled_again(self, client: ClientRecord, token: TokenRecord) -> ClientRecord:
        """Return this client with the credential of its repeated enrolment.

        A known nonce is not sufficient to take over the client: the runs of the token must be the
        same.

        Raises:
            TokenRefused: The enrolment may come from another device; with the reason.
        """
        if self.revoked_at is not None:
            raise TokenRefused("this client was revoked")
        if self.runs != token.runs:
            raise TokenRefused("this client enrolled for other runs: it needs a new nonce")
        return replace(self, credential_sha256=client.credential_sha256, previous_sha256=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A client that waits for work; stored so that draws after a restart are the same.

    Attributes:
        client_index: Its enrolment index.
        run_id: The only run that it works for; None is any.
        until: Expiry, seconds since the epoch.
    """

    client_index: int
    num_examples: int
    run_id: str | None
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHead:
    """A `RunRecord` without its large parts: candidates and arrays.

    Attributes:
        document: The state without its arrays, JSON.
        version: Number of commits.
        created_at: Seconds since the epoch.
    """

    run_id: str
    spec: str
    document: str
    version: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(RunHead):
    """A run and its newest state, opaque to the store."""

    candidates: str
    arrays: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedWork:
    """A closed assignment, stored to answer repeated and late updates.

    Attributes:
        outcome: ``accepted``, or why it ended without an update.
    """

    assignment_id: str
    run_id: str
    client_index: int
    outcome: str
    body_sha256: str | None = None
    receipt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One line of a run's log.

    Attributes:
        body: JSON.
        version: The run's version after its commit; set by the store.
    """

    kind: str
    body: str
    version: int = 0


SERVER = -1
"""Index of the server among the owners of memories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMemory:
    """A method memory of a client, or the server's state, as of a round.

    Attributes:
        round: Number of rounds done at which it holds. A rollback to this round or a later one
            keeps it.
    """

    client_index: int
    round: int
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """All changes of one event, committed atomically.

    Attributes:
        document: The new state without its arrays.
        arrays: The new arrays; None if unchanged.
        log: Lines to append, in order.
        memories: Memories, each of which replaces the one of its owner and round.
        back_to: Round of a rollback: the memories of later rounds are deleted. None for none.
        signal: Signal to publish after the commit; None for none. It is lost if the process exits
            in between.
    """

    document: str
    arrays: bytes | None = None
    closed: tuple[ClosedWork, ...] = ()
    log: tuple[LogEntry, ...] = ()
    memories: tuple[StoredMemory, ...] = ()
    back_to: int | None = None
    signal: str | None = None


def check_run_of(closed: Iterable[ClosedWork], run_id: str) -> None:
    """Raise ``ValueError`` if closed work is of another run."""
    if any(work.run_id != run_id for work in closed):
        raise ValueError(f"closed work is not of run {run_id!r}")
