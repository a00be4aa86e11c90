"""Who is let in: enrolment tokens, and the clients that came with them."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from fedone_sdk.aggregator.access.signing import Signatures, SignedRequest
from fedone_sdk.aggregator.access.tokens import (
    Authority,
    EnrolmentToken,
    digest,
    may_see,
    new_secret,
)
from fedone_sdk.aggregator.cluster.signals import ClientChanged, publish
from fedone_sdk.aggregator.runtime.shielded import run_shielded
from fedone_sdk.clock import Clock
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.messages import Enrol, Enrolled, NewToken, Rotated
from fedone_sdk.stores import ClientRecord, Store, TokenRecord, TokenRefused

__all__ = ["Access", "CONFIGURED", "may_see"]

_log = structlog.get_logger(__name__)

CONFIGURED = "config:"
"""Names of configured tokens begin with this; those of tokens that people make cannot."""

_SEEN_S = 86_400.0
"""When a client was last seen is kept this exactly, seconds: each time is a write."""
_AT_ONCE = 4
"""Credentials and tokens that nobody here knows are looked up so many at a time: guessing must
not take the store from those who work."""


class Access:
    """Enrolment tokens and clients, as this replica sees them.

    Clients that came lately are kept at hand; the others are read from the store when they come.

    Args:
        store: Keeps tokens and clients; other replicas may change them.
        authority: What is configured.
        clock: Tells the time.
        capacity: How many clients are kept at hand.

    Attributes:
        authority: As given.
        on_revoked: Told of clients that were revoked, here or elsewhere.
    """

    def __init__(
        self, *, store: Store, authority: Authority, clock: Clock, capacity: int = 32_768
    ) -> None:
        self.authority = authority
        self.on_revoked: list[Callable[[ClientRecord], None]] = []
        self._store = store
        self._clock = clock
        self._capacity = capacity
        self._signatures = Signatures(store, clock, window_s=authority.signature_window_s)
        # The one that came least lately first.
        self._records: OrderedDict[int, ClientRecord] = OrderedDict()
        self._indices: dict[str, int] = {}
        self._tokens: frozenset[str] = frozenset()
        self._num_clients = 0
        # Counts what may have changed in the store: what was read before is not kept.
        self._changes = 0
        self._looking = asyncio.Semaphore(_AT_ONCE)
        self._changing = asyncio.Lock()

    @property
    def num_clients(self) -> int:
        """How many clients are enrolled, as far as this replica has seen."""
        return self._num_clients

    async def open(self) -> None:
        """Brings the configured tokens into the store, and reads what it holds.

        A configured token that is not in the configuration any more is revoked.

        Raises:
            SpecError: A configured token has the secret of another token.
        """
        self._forget_all()
        await self._configure()
        await self._read_tokens()
        await self.recount()
        newest = max(self._num_clients - self._capacity, 0)
        for client in await self._store.clients(newest - 1, self._capacity):
            self._remember(client)

    async def reload(self, index: int | None = None) -> None:
        """Another replica has changed a client, or None: nobody knows what was changed."""
        if index is None:
            self._forget_all()
            await self.recount()
            return
        self._forget(index)
        self._num_clients = max(self._num_clients, index + 1)
        client = await self._store.client_at(index)
        if client is not None and client.revoked_at is not None:
            self._tell_revoked(client)

    async def recount(self) -> None:
        """Counts the clients anew: some may have come in of which nobody told."""
        self._num_clients = await self._store.num_clients()

    # Tokens

    async def check_token(self, token: str | None) -> None:
        """Refuses strangers before their request is read; `enrol` looks at all the rest.

        Raises:
            ProblemError: ``unauthorized``.
        """
        if token is not None:
            given = digest(token)
            if self._has_token(given):
                return
            async with self._looking:
                await self._read_tokens()
            if self._has_token(given):
                return
        raise ProblemError("unauthorized", "enrolment needs a valid enrolment token")

    async def create_token(self, message: NewToken) -> tuple[TokenRecord, str]:
        """Makes an enrolment token.

        Returns:
            The token and its secret, which is kept nowhere.

        Raises:
            ProblemError: ``token_conflict`` when the name is taken.
        """
        secret, now = new_secret("fedone_enrol"), self._clock.now()
        token = TokenRecord(
            name=message.name,
            token_sha256=digest(secret),
            runs=message.runs,
            uses_left=message.uses,
            expires_at=None if message.expires_in_s is None else now + message.expires_in_s,
            created_at=now,
        )
        async with self._changing:
            if any(known.name == token.name for known in await self._store.tokens()):
                raise ProblemError(
                    "token_conflict", f"there is an enrolment token {token.name!r} already"
                )
            await self._store.put_token(token)
        self._tokens |= {token.token_sha256}
        _log.info("enrolment token made", token=token.name, runs=token.runs, uses=token.uses_left)
        return token, secret

    async def tokens(self) -> list[TokenRecord]:
        """All enrolment tokens, in the order they were added."""
        return await self._store.tokens()

    async def revoke_token(self, name: str) -> TokenRecord:
        """Revokes an enrolment token for good; clients that came with it stay.

        Raises:
            ProblemError: ``not_found``.
        """
        token = await self._store.revoke_token(name, self._clock.now())
        if token is None:
            raise ProblemError("not_found", f"there is no enrolment token {name!r}")
        _log.info("enrolment token revoked", token=name)
        return token

    # Clients

    async def enrol(self, token: str | None, message: Enrol) -> Enrolled:
        """Makes a client identity for who holds an enrolment token.

        Asked again with the same nonce, it is the same client with a new credential.

        Raises:
            ProblemError: ``unauthorized``; ``forbidden`` without a public key where requests must
                be signed.
        """
        if token is None:
            raise ProblemError("unauthorized", "enrolment needs a valid enrolment token")
        if self.authority.require_signatures and message.public_key is None:
            raise ProblemError("forbidden", "requests must be signed here: enrol with a public_key")
        credential, now = new_secret("fedone"), self._clock.now()
        client = ClientRecord(
            index=-1,
            client_id=f"client-{uuid.uuid4().hex[:12]}",
            credential_sha256=digest(credential),
            name=message.name,
            enrolled_at=now,
            enrolment_sha256=None if message.nonce is None else digest(message.nonce),
            public_key=message.public_key,
        )
        wanted = client.client_id
        try:
            client = await self._store.enrol(client, digest(token), now)
        except TokenRefused as exc:
            raise ProblemError("unauthorized", str(exc)) from None
        self._num_clients = max(self._num_clients, client.index + 1)
        again = client.client_id != wanted
        if again:
            await self._changed(client.index)
        else:
            self._remember(client)
            # Others count it: how many there are says whether somebody may still come.
            await publish(self._store, ClientChanged(client_index=client.index))
        _log.info("enrolled", client_id=client.client_id, token=client.token, again=again)
        return Enrolled(client_id=client.client_id, credential=credential)

    def known(self, credential: str | None) -> bool:
        """Whether this is the credential of a client that is at hand."""
        client = None if credential is None else self._at_hand(digest(credential))
        return client is not None and client.revoked_at is None

    async def client(self, credential: str | None) -> ClientRecord:
        """The client that this credential belongs to.

        Raises:
            ProblemError: ``unauthorized``.
        """
        client = None
        if credential is not None:
            given = digest(credential)
            client = self._at_hand(given) or await self._look_up(given)
        if client is None:
            raise ProblemError("unauthorized", "this needs the credential of an enrolled client")
        _refuse_revoked(client)
        if client.previous_sha256 is not None and client.previous_sha256 != given:
            # It has the new one: nobody needs the one before.
            await run_shielded(self._drop_previous(client.index, given), of=self._store)
        seen_at = client.enrolled_at if client.seen_at is None else client.seen_at
        if self._clock.now() - seen_at > _SEEN_S:
            await run_shielded(self._see(client), of=self._store)
        return client

    async def check_still(self, client: ClientRecord) -> None:
        """Refuses a client that was revoked since it was let in: its request may have taken long.

        Raises:
            ProblemError: ``unauthorized``.
        """
        now = await self.record(client.index)
        if now is not None:
            _refuse_revoked(now)

    def signs(self, client: ClientRecord) -> bool:
        """Whether a client's requests must be signed."""
        return client.public_key is not None or self.authority.require_signatures

    async def check_signature(self, client: ClientRecord, request: SignedRequest) -> None:
        """Refuses a request that this client has not signed, or that was seen before.

        Raises:
            ProblemError: ``invalid_signature`` or ``clock_skew``.
        """
        await self._signatures.check(client, request)

    async def rotate(self, client: ClientRecord, credential: str | None) -> Rotated:
        """Gives a client a new credential; the one it came with works until the new one is used.

        Raises:
            ProblemError: ``unauthorized`` when that one is not valid any more.
        """
        given, secret = digest(credential or ""), new_secret("fedone")
        async with self._changing:
            now = await self._store.client_at(client.index)
            # Of two that rotate at once with one credential the second would lock the first out.
            if now is None or given not in (now.credential_sha256, now.previous_sha256):
                raise ProblemError("unauthorized", "this credential was replaced by another one")
            await self._store.set_credential(client.index, digest(secret), given)
        await self._changed(client.index)
        _log.info("credential rotated", client_id=client.client_id)
        return Rotated(credential=secret)

    async def clients(self, after: int = -1, limit: int | None = None) -> list[ClientRecord]:
        """Clients in the order they enrolled; see `Store.clients`."""
        return await self._store.clients(after, limit)

    async def revoke_client(self, client_id: str) -> ClientRecord:
        """Revokes a client for good.

        Raises:
            ProblemError: ``not_found``.
        """
        client = await self.by_name(client_id)
        await self._store.revoke_client(client.index, self._clock.now())
        await self._changed(client.index)
        client = await self.by_name(client_id)
        self._tell_revoked(client)
        _log.info("client revoked", client_id=client_id)
        return client

    async def retire(self, index: int) -> None:
        """Erases a client that is not seen any more, but for its index and public name."""
        await self._store.retire_client(index, self._clock.now())
        await self._changed(index)
        _log.info("client retired", client=index)

    async def by_name(self, client_id: str) -> ClientRecord:
        """The client with this public name.

        Raises:
            ProblemError: ``not_found``.
        """
        client = await self._store.client_named(client_id)
        if client is None:
            raise ProblemError("not_found", f"there is no client {client_id!r}")
        return client

    async def record(self, index: int) -> ClientRecord | None:
        """The client with this enrolment index."""
        client = self._records.get(index)
        if client is None:
            changes = self._changes
            client = await self._store.client_at(index)
            self._keep(client, changes)
        return client

    async def names(self, indices: Sequence[int]) -> list[str]:
        """The public names of clients by enrolment index."""
        clients = [await self.record(index) for index in indices]
        return ["unknown" if client is None else client.client_id for client in clients]

    # What is at hand

    def _at_hand(self, given: str) -> ClientRecord | None:
        # A dictionary of digests: what its timing could tell is the digest, not the secret.
        index = self._indices.get(given)
        if index is None:
            return None
        self._records.move_to_end(index)
        return self._records[index]

    async def _look_up(self, given: str) -> ClientRecord | None:
        async with self._looking:
            changes = self._changes
            client = await self._store.client(given)
            self._keep(client, changes)
            return client

    def _keep(self, client: ClientRecord | None, changes: int) -> None:
        """Keeps what was read, unless something was changed meanwhile."""
        if client is not None and changes == self._changes:
            self._remember(client)
            self._num_clients = max(self._num_clients, client.index + 1)

    def _remember(self, client: ClientRecord) -> None:
        self._drop(client.index)
        self._records[client.index] = client
        for known in (client.credential_sha256, client.previous_sha256):
            if known is not None:
                self._indices[known] = client.index
        if len(self._records) > self._capacity:
            self._drop(next(iter(self._records)))

    def _drop(self, index: int) -> None:
        client = self._records.pop(index, None)
        if client is not None:
            self._indices.pop(client.credential_sha256, None)
            self._indices.pop(client.previous_sha256 or "", None)

    def _forget(self, index: int) -> None:
        self._changes += 1
        self._drop(index)

    def _forget_all(self) -> None:
        self._changes += 1
        self._records.clear()
        self._indices.clear()

    # What is changed

    async def _see(self, client: ClientRecord) -> None:
        now = self._clock.now()
        await self._store.see_client(client.index, now)
        if self._records.get(client.index) is client:
            self._remember(replace(client, seen_at=now))

    async def _drop_previous(self, index: int, given: str) -> None:
        async with self._changing:
            now = await self._store.client_at(index)
            if now is None or now.previous_sha256 is None or now.credential_sha256 != given:
                return  # Somebody else was faster.
            await self._store.set_credential(index, given, None)
        await self._changed(index)

    async def _changed(self, index: int) -> None:
        self._forget(index)
        await publish(self._store, ClientChanged(client_index=index))

    def _tell_revoked(self, client: ClientRecord) -> None:
        for listener in self.on_revoked:
            listener(client)

    # Tokens of the configuration

    def _has_token(self, given: str) -> bool:
        # Every entry is compared: how long it takes tells nothing about which one matched.
        return any([hmac.compare_digest(given, known) for known in self._tokens])

    async def _read_tokens(self) -> None:
        self._tokens = frozenset(token.token_sha256 for token in await self._store.tokens())

    async def _configure(self) -> None:
        now = self._clock.now()
        kept = {token.name: token for token in await self._store.tokens()}
        numbered = _names(self.authority.enrolment_tokens, kept)
        for name, token in numbered.items():
            record = TokenRecord(
                name=name,
                token_sha256=token.token_sha256,
                runs=token.runs,
                uses_left=token.uses,
                expires_at=token.expires_at,
                created_at=now,
            )
            try:
                await self._store.put_token(record)
            except ValueError as exc:
                raise SpecError(f"auth.enrolment_tokens: {name}: {exc}") from exc
            if name in kept and kept[name].revoked_at is not None:
                _log.warning("a configured enrolment token was revoked, for good", token=name)
        for name, known in kept.items():
            if name.startswith(CONFIGURED) and name not in numbered and known.revoked_at is None:
                await self._store.revoke_token(name, now)
                _log.info("enrolment token revoked: not configured any more", token=name)


def _refuse_revoked(client: ClientRecord) -> None:
    if client.revoked_at is not None:
        raise ProblemError("unauthorized", "this client was revoked")


def _names(
    tokens: Sequence[EnrolmentToken], kept: dict[str, TokenRecord]
) -> dict[str, EnrolmentToken]:
    """The tokens by the names that the store has, or gets, for them.

    One without a name is known again by its secret, so that the order may change; a new one gets
    a number that was never used.
    """
    by_digest = {
        token.token_sha256: name for name, token in kept.items() if name.startswith(CONFIGURED)
    }
    named = {f"{CONFIGURED}{token.name}": token for token in tokens if token.name is not None}
    if len(named) < sum(token.name is not None for token in tokens):
        raise SpecError("auth.enrolment_tokens: two tokens have the same name")
    if len({token.token_sha256 for token in tokens}) < len(tokens):
        raise SpecError("auth.enrolment_tokens: two tokens have the same secret")
    number = 0
    for token in tokens:
        if token.name is not None:
            continue
        name = by_digest.get(token.token_sha256)
        while name is None or name in named:
            number += 1
            name = f"{CONFIGURED}{number}"
            if name in kept:
                name = None
        named[name] = token
    return named
