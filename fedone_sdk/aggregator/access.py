"""Enrolment tokens and enrolled clients."""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count

import structlog

from fedone_sdk.aggregator.authority import Authority, EnrolmentToken, digest, new_secret
from fedone_sdk.aggregator.concurrency import run_to_end
from fedone_sdk.aggregator.signals import ClientChanged, publish
from fedone_sdk.clock import Clock
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.messages import Enrol, Enrolled, NewToken, Rotated
from fedone_sdk.stores import ClientRecord, Store, TokenRecord, TokenRefused

_log = structlog.get_logger(__name__)

_CONFIGURED = "config:"
"""Prefix of the names of configured tokens; the names of other tokens cannot start with it."""

_CHANGE_TEXTS = {
    "token_created": "enrolment token created",
    "token_changed": "enrolment token changed",
    "token_revoked": "enrolment token revoked",
    "client_revoked": "client revoked",
    "client_retired": "client retired",
}
"""Texts of changes in the log, by the change's label in the metric ``fedone_access_changes``."""

_SEEN_PRECISION_S = 86_400.0
"""The time of a client's last request is stored at most this often, seconds."""
_MAX_LOOKUPS = 4
"""Maximal number of concurrent lookups of unknown secrets; limits the load from guessed secrets."""


class Access:
    """Enrolment tokens and clients, with a cache of recently seen clients.

    Attributes:
        changes: Number of changes to tokens and clients by this replica, by kind.
        on_revoked: Called with each client that is revoked on any replica.
        num_clients: Number of enrolled clients known to this replica.
    """

    def __init__(
        self, *, store: Store, authority: Authority, clock: Clock, capacity: int = 32_768
    ) -> None:
        self.authority = authority
        self.changes = dict.fromkeys(_CHANGE_TEXTS, 0)
        self.on_revoked: list[Callable[[ClientRecord], None]] = []
        self._store = store
        self._clock = clock
        self._capacity = capacity
        # Least recently used first.
        self._records: OrderedDict[int, ClientRecord] = OrderedDict()
        self._index_by_secret: dict[str, int] = {}
        self._tokens: frozenset[str] = frozenset()
        self.num_clients = 0
        # Incremented at each change in the store, so that results of earlier reads are not cached.
        self._generation = 0
        self._lookups = asyncio.Semaphore(_MAX_LOOKUPS)
        self._write_lock = asyncio.Lock()

    async def open(self) -> None:
        """Add the configured tokens to the store, and load all tokens.

        A stored token that is not configured here stays valid: another replica may configure it.

        Raises:
            SpecError: A configured token has the secret of a token that an admin has created.
        """
        await self._configure()
        await self._read_tokens()
        await self.reload_all()

    async def reload_all(self) -> None:
        """Cache the most recently enrolled clients again, in case other replicas changed them."""
        self._generation += 1
        self._records.clear()
        self._index_by_secret.clear()
        self.num_clients = await self._store.num_clients()
        generation, first = self._generation, max(self.num_clients - self._capacity, 0)
        for client in await self._store.clients(first - 1, self._capacity):
            self._cache_if_current(client, generation)

    async def reload(self, index: int) -> None:
        """Read again a client that another replica has changed."""
        self._invalidate(index)
        self.num_clients = max(self.num_clients, index + 1)
        client = await self.record(index)
        if client is not None and client.revoked_at is not None:
            self._notify_revoked(client)

    async def check_token(self, token: str | None) -> None:
        """Refuse a request without a valid token (``unauthorized``) before its body is read."""
        if token is not None:
            secret_sha256 = digest(token)
            if self._has_token(secret_sha256):
                return
            async with self._lookups:
                await self._read_tokens()
            if self._has_token(secret_sha256):
                return
        raise ProblemError("unauthorized", "enrolment needs a valid enrolment token")

    async def create_token(self, message: NewToken) -> tuple[TokenRecord, str]:
        """Create an enrolment token; return it with its secret, which is not stored.

        Raises:
            ProblemError: ``token_conflict`` if the name is taken.
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
        try:
            await self._store.put_token(token)
        except ValueError as exc:
            raise ProblemError("token_conflict", str(exc)) from exc
        self._tokens |= {token.token_sha256}
        self._count_and_log(
            "token_created", {"token": token.name, "runs": token.runs, "uses": token.uses_left}
        )
        return token, secret

    async def revoke_token(self, name: str) -> TokenRecord:
        """Revoke an enrolment token, but not its clients; an unknown token is ``not_found``."""
        token = await self._store.revoke_token(name, self._clock.now())
        if token is None:
            raise ProblemError("not_found", f"there is no enrolment token {name!r}")
        self._count_and_log("token_revoked", {"token": name})
        return token

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        """Enrol a client, or refuse its token (``unauthorized``).

        A repeated request with the same nonce returns the same client with a new credential.
        """
        credential, now = new_secret("fedone"), self._clock.now()
        client = ClientRecord(
            index=-1,
            client_id=f"client-{uuid.uuid4().hex[:12]}",
            credential_sha256=digest(credential),
            name=message.name,
            enrolled_at=now,
            enrolment_sha256=None if message.nonce is None else digest(message.nonce),
        )
        new_id = client.client_id
        try:
            client = await self._store.enrol(client, digest(token), now)
        except TokenRefused as exc:
            raise ProblemError("unauthorized", str(exc)) from None
        self.num_clients = max(self.num_clients, client.index + 1)
        again = client.client_id != new_id
        if again:
            await self._on_changed(client.index)
        else:
            self._cache(client)
            # The other replicas update their `num_clients`.
            await publish(self._store, ClientChanged(client_index=client.index))
        _log.info("enrolled", client_id=client.client_id, token=client.token, again=again)
        return Enrolled(client_id=client.client_id, credential=credential)

    def is_cached(self, credential: str | None) -> bool:
        """Whether this is the credential of a cached client."""
        client = None if credential is None else self._cached(digest(credential))
        return client is not None and client.revoked_at is None

    async def authenticate(
        self, credential: str | None, *, wanted: str = "the credential of an enrolled client"
    ) -> ClientRecord:
        """Return the client with this credential, or refuse it (``unauthorized``)."""
        client = None
        if credential is not None:
            secret_sha256 = digest(credential)
            client = self._cached(secret_sha256) or await self._fetch(secret_sha256)
        if client is None:
            raise ProblemError("unauthorized", f"this needs {wanted}")
        _refuse_revoked(client)
        if client.previous_sha256 is not None and client.previous_sha256 != secret_sha256:
            # The client uses its new credential, so it does not need the previous one any more.
            await run_to_end(self._clear_previous(client.index, secret_sha256), owner=self._store)
        seen_at = client.enrolled_at if client.seen_at is None else client.seen_at
        if self._clock.now() - seen_at > _SEEN_PRECISION_S:
            await run_to_end(self._record_seen(client), owner=self._store)
        return client

    async def check_active(self, client: ClientRecord) -> None:
        """Refuse a client that was revoked during its request (``unauthorized``)."""
        current = await self.record(client.index)
        if current is not None:
            _refuse_revoked(current)

    async def rotate(self, client: ClientRecord, credential: str | None) -> Rotated:
        """Issue a new credential; the current one stays valid until the new one is used."""
        secret_sha256, secret = digest(credential or ""), new_secret("fedone")
        async with self._write_lock:
            row = await self._store.client_at(client.index)
            # A second concurrent rotation must not invalidate the result of the first one.
            if row is None or secret_sha256 not in (row.credential_sha256, row.previous_sha256):
                raise ProblemError("unauthorized", "this credential was replaced by another one")
            await self._store.change_client(
                client.index, credential_sha256=digest(secret), previous_sha256=secret_sha256
            )
        await self._on_changed(client.index)
        _log.info("credential rotated", client_id=client.client_id)
        return Rotated(credential=secret)

    async def revoke_client(self, client_id: str) -> ClientRecord:
        """Revoke a client permanently; an unknown client is ``not_found``."""
        client = await self.by_name(client_id)
        if client.revoked_at is None:
            await self._store.change_client(client.index, revoked_at=self._clock.now())
        await self._on_changed(client.index)
        client = await self.by_name(client_id)
        self._notify_revoked(client)
        self._count_and_log("client_revoked", {"client_id": client_id})
        return client

    async def retire(self, index: int) -> None:
        """Erase an idle client except for its index and public id."""
        await self._store.retire_client(index, self._clock.now())
        await self._on_changed(index)
        self._count_and_log("client_retired", {"client": index}, expected=True)

    async def by_name(self, client_id: str) -> ClientRecord:
        """Return the client with this public id; an unknown id is ``not_found``."""
        client = await self._store.client_named(client_id)
        if client is None:
            raise ProblemError("not_found", f"there is no client {client_id!r}")
        return client

    async def record(self, index: int) -> ClientRecord | None:
        """Return the client with this enrolment index, if any."""
        client = self._records.get(index)
        if client is None:
            generation = self._generation
            client = await self._store.client_at(index)
            self._cache_if_current(client, generation)
        return client

    async def names(self, indices: Sequence[int]) -> list[str]:
        """Return the public ids of the clients with these enrolment indices."""
        clients = [await self.record(index) for index in indices]
        return ["unknown" if client is None else client.client_id for client in clients]

    def _cached(self, secret_sha256: str) -> ClientRecord | None:
        # An attacker who measures the duration can learn the digest, but not the secret.
        index = self._index_by_secret.get(secret_sha256)
        if index is None:
            return None
        self._records.move_to_end(index)
        return self._records[index]

    async def _fetch(self, secret_sha256: str) -> ClientRecord | None:
        async with self._lookups:
            generation = self._generation
            client = await self._store.client(secret_sha256)
            self._cache_if_current(client, generation)
            return client

    def _cache_if_current(self, client: ClientRecord | None, generation: int) -> None:
        """Cache a record unless the store changed during the read."""
        if client is not None and generation == self._generation:
            self._cache(client)
            self.num_clients = max(self.num_clients, client.index + 1)

    def _cache(self, client: ClientRecord) -> None:
        self._evict(client.index)
        self._records[client.index] = client
        for secret_sha256 in (client.credential_sha256, client.previous_sha256):
            if secret_sha256 is not None:
                self._index_by_secret[secret_sha256] = client.index
        if len(self._records) > self._capacity:
            self._evict(next(iter(self._records)))

    def _evict(self, index: int) -> None:
        client = self._records.pop(index, None)
        if client is not None:
            self._index_by_secret.pop(client.credential_sha256, None)
            self._index_by_secret.pop(client.previous_sha256 or "", None)

    def _invalidate(self, index: int) -> None:
        self._generation += 1
        self._evict(index)

    async def _record_seen(self, client: ClientRecord) -> None:
        now = self._clock.now()
        await self._store.change_client(client.index, seen_at=now)
        if self._records.get(client.index) is client:
            self._cache(replace(client, seen_at=now))

    async def _clear_previous(self, index: int, secret_sha256: str) -> None:
        async with self._write_lock:
            row = await self._store.client_at(index)
            if row is None or row.previous_sha256 is None or row.credential_sha256 != secret_sha256:
                return  # A concurrent request has cleared it already.
            await self._store.change_client(
                index, credential_sha256=secret_sha256, previous_sha256=None
            )
        await self._on_changed(index)

    async def _on_changed(self, index: int) -> None:
        self._invalidate(index)
        await self.record(index)
        await publish(self._store, ClientChanged(client_index=index))

    def _notify_revoked(self, client: ClientRecord) -> None:
        for listener in self.on_revoked:
            listener(client)

    def _count_and_log(
        self, change: str, facts: Mapping[str, object], *, expected: bool = False
    ) -> None:
        self.changes[change] += 1
        (_log.info if expected else _log.warning)(_CHANGE_TEXTS[change], **facts)

    def _has_token(self, secret_sha256: str) -> bool:
        # Compares with all tokens, so that the duration does not reveal which token matched.
        return any([hmac.compare_digest(secret_sha256, known) for known in self._tokens])

    async def _read_tokens(self) -> None:
        self._tokens = frozenset(token.token_sha256 for token in await self._store.tokens())

    async def _configure(self) -> None:
        """Store the configured tokens, or update the stored tokens that have the same secrets."""
        stored = {token.token_sha256: token for token in await self._store.tokens()}
        is_first_start = not stored
        for token in self.authority.enrolment_tokens:
            record = stored.pop(token.token_sha256, None)
            if record is None:
                await self._add(token, expected=is_first_start)
                continue
            if not record.name.startswith(_CONFIGURED):
                raise SpecError(
                    f"auth.enrolment_tokens: {token.name or 'a token'} has the same secret as the "
                    f"token {record.name!r}, which an admin has created"
                )
            if record.revoked_at is not None:
                _log.warning(
                    "a configured enrolment token is not valid: it was revoked", token=record.name
                )
                continue
            new = token.record(record.name, record.created_at)
            if (record.runs, record.expires_at) != (new.runs, new.expires_at):
                await self._store.put_token(new)
                facts = {"token": new.name, "runs": new.runs, "expires_at": new.expires_at}
                self._count_and_log("token_changed", facts)
        for record in stored.values():
            if record.name.startswith(_CONFIGURED) and record.revoked_at is None:
                _log.warning(
                    "an enrolment token is not configured here, but is valid until it is revoked",
                    token=record.name,
                )

    async def _add(self, token: EnrolmentToken, *, expected: bool) -> None:
        """Store a new configured token, under a numbered name if its name is missing or taken."""
        names: Iterator[str] = (f"{_CONFIGURED}{number}" for number in count(1))
        if token.name is not None:
            first = f"{_CONFIGURED}{token.name}"
            names = chain([first], (f"{first}-{number}" for number in count(1)))
        for name in names:
            try:
                await self._store.put_token(token.record(name, self._clock.now()))
            except ValueError:
                continue
            facts = {"token": name, "runs": token.runs, "uses": token.uses}
            self._count_and_log("token_created", facts, expected=expected)
            return


def _refuse_revoked(client: ClientRecord) -> None:
    if client.revoked_at is not None:
        raise ProblemError("unauthorized", "this client was revoked")
