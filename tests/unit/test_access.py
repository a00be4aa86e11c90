"""Enrolment tokens and clients: access, expiry, revocation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from fedone_sdk.aggregator import authority as tokens
from fedone_sdk.aggregator.access import Access
from fedone_sdk.aggregator.authority import AdminToken, Authority, EnrolmentToken, digest, may_see
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.messages import Enrol, NewToken
from fedone_sdk.stores import ClientRecord, MemoryStore, TokenRecord
from fedone_sdk.testing import ManualClock


class CountedStore(MemoryStore):
    """Counts the reads that strangers can cause."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.most_at_once = 0
        self._at_once = 0
        self.published: list[str] = []
        self.several = False

    @property
    def shared(self) -> bool:
        return self.several

    async def publish(self, signal: str) -> None:
        self.published.append(signal)

    async def client(self, credential_sha256: str) -> ClientRecord | None:
        self.reads += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        return await super().client(credential_sha256)


async def access_of(
    store: MemoryStore | None = None,
    *tokens: str | EnrolmentToken,
    clock: ManualClock | None = None,
    capacity: int = 100,
    **settings: bool,
) -> Access:
    authority = Authority(enrolment_tokens=tokens or ["fleet-secret"], **settings)
    access = Access(
        store=store or MemoryStore(),
        authority=authority,
        clock=clock or ManualClock(),
        capacity=capacity,
    )
    await access.open()
    return access


async def refused(access: Access, credential: str | None) -> str:
    with pytest.raises(ProblemError) as caught:
        await access.authenticate(credential)
    assert caught.value.code == "unauthorized"
    return caught.value.detail


class TestTokens:
    async def test_another_order_is_no_other_token(self) -> None:
        store = MemoryStore()
        await access_of(store, "one", "two")
        await access_of(store, "two", "three", "one")
        assert [
            (t.name, t.token_sha256 == digest(s), t.revoked_at)
            for t, s in zip(await store.tokens(), ("one", "two", "three"), strict=True)
        ] == [("config:1", True, None), ("config:2", True, None), ("config:3", True, None)]

    async def test_only_a_command_revokes_a_token(self) -> None:
        store = MemoryStore()
        named = [EnrolmentToken(token=SecretStr(one), name="fleet") for one in ("new", "old")]
        there = await access_of(store, "one", named[0])
        with capture_logs() as logs:
            # Another replica with an old configuration: another secret of the same name, and none
            # of the numbered one.
            here = await access_of(store, named[1])
        stays = "an enrolment token is not configured here, but is valid until it is revoked"
        assert [(line["log_level"], line["event"], line["token"]) for line in logs] == [
            ("warning", "enrolment token created", "config:fleet-1"),
            ("warning", stays, "config:1"),
            ("warning", stays, "config:fleet"),
        ]
        for access in (here, there):
            for secret in ("one", "new", "old"):
                enrolled = await access.enrol(secret, Enrol())
        with capture_logs() as logs:
            await there.revoke_token("config:fleet-1")
        assert [line["log_level"] for line in logs] == ["warning"]
        assert (here.changes["token_created"], there.changes["token_revoked"]) == (1, 1)
        again = await access_of(store, named[1])  # Its configuration does not undo the command.
        for access in (here, there, again):
            with pytest.raises(ProblemError, match="was revoked"):
                await access.enrol("old", Enrol())
            assert (await access.authenticate(enrolled.credential)).client_id == enrolled.client_id

    async def test_limits_follow_the_configuration(self) -> None:
        store = MemoryStore()
        token = EnrolmentToken(token=SecretStr("t"), uses=2)
        await (await access_of(store, token)).enrol("t", Enrol())
        access = await access_of(store, token.model_copy(update={"runs": ("acme-*",), "uses": 9}))
        enrolled = await access.enrol("t", Enrol())
        assert (await access.authenticate(enrolled.credential)).runs == ("acme-*",)
        assert access.changes["token_changed"] == 1
        with pytest.raises(ProblemError, match="used up"):
            await access.enrol("t", Enrol())

    async def test_tokens_that_people_made_outlive_a_configuration(self) -> None:
        store = MemoryStore()
        access = await access_of(store)
        _, secret = await access.create_token(NewToken(name="fleet"))
        access = await access_of(store, "another")
        await access.enrol(secret, Enrol())

    @pytest.mark.parametrize(
        "tokens",
        [
            ["same", "same"],
            [
                EnrolmentToken(token=SecretStr("a"), name="n"),
                EnrolmentToken(token=SecretStr("b"), name="n"),
            ],
        ],
    )
    async def test_two_tokens_must_not_be_one(self, tokens: Sequence[EnrolmentToken]) -> None:
        with pytest.raises(ValueError, match="enrolment_tokens: two tokens have the same"):
            await access_of(None, *tokens)

    async def test_an_error_for_a_duplicate_secret_does_not_contain_it(self) -> None:
        store = MemoryStore()
        await store.put_token(
            TokenRecord(name="made", token_sha256=digest("fleet-secret"), created_at=0)
        )
        with pytest.raises(SpecError, match="enrolment_tokens: a token has the same") as caught:
            await access_of(store)
        assert "fleet-secret" not in str(caught.value)

    async def test_a_token_of_another_replica_is_found(self) -> None:
        store = MemoryStore()
        here, there = await access_of(store), await access_of(store)
        _, secret = await there.create_token(NewToken(name="acme"))
        await here.check_token(secret)


class TestClients:
    async def test_a_revoked_client_is_shut_out_at_once(self) -> None:
        clock, events = ManualClock(), []
        access = await access_of(clock=clock)
        access.on_revoked.append(events.append)
        enrolled = await access.enrol("fleet-secret", Enrol())
        await access.authenticate(enrolled.credential)
        revoked = await access.revoke_client(enrolled.client_id)
        assert revoked.revoked_at == clock.now()
        assert events == [revoked]
        assert not access.is_cached(enrolled.credential)
        for _ in range(2):
            assert await refused(access, enrolled.credential) == "this client was revoked"

    async def test_changes_of_another_replica_are_read_at_its_signal(self) -> None:
        store, events = CountedStore(), []
        store.several = True
        here, there = await access_of(store), await access_of(store)
        here.on_revoked.append(events.append)
        enrolled = await there.enrol("fleet-secret", Enrol())
        client = await here.authenticate(enrolled.credential)
        await there.revoke_client(enrolled.client_id)
        assert store.published == ['{"kind":"client","client_index":0}'] * 2  # enrolled, revoked
        await here.reload(client.index)
        await refused(here, enrolled.credential)
        assert [revoked.client_id for revoked in events] == [enrolled.client_id]

    async def test_a_read_that_a_change_overtakes_is_not_kept(self) -> None:
        class SlowStore(MemoryStore):
            async def client(self, credential_sha256: str) -> ClientRecord | None:
                found = await super().client(credential_sha256)
                await passed.wait()
                return found

        store, passed = SlowStore(), asyncio.Event()
        access = await access_of(store, capacity=1)
        enrolled = await access.enrol("fleet-secret", Enrol())
        await access.enrol("fleet-secret", Enrol())  # takes its place at hand
        reading = asyncio.create_task(access.authenticate(enrolled.credential))
        await asyncio.sleep(0)
        await access.revoke_client(enrolled.client_id)
        passed.set()
        await reading  # It was in time.
        await refused(access, enrolled.credential)

    async def test_clients_that_are_not_at_hand_are_read(self) -> None:
        store = CountedStore()
        access = await access_of(store, capacity=2)
        credentials = [
            (await access.enrol("fleet-secret", Enrol(name=str(number)))).credential
            for number in range(5)
        ]
        assert [access.is_cached(credential) for credential in credentials] == [False] * 3 + [
            True
        ] * 2
        for number, credential in enumerate(credentials):
            assert (await access.authenticate(credential)).name == str(number)
        assert [(await access.record(number)).name for number in range(5)] == list("01234")
        assert access.num_clients == 5

    async def test_guessing_does_not_take_the_store(self) -> None:
        store = CountedStore()
        access = await access_of(store)
        await asyncio.gather(*(refused(access, f"guess {number}") for number in range(50)))
        assert store.most_at_once <= 4
        await refused(access, None)
        assert store.reads == 50


class TestRotation:
    async def test_the_new_credential_ends_the_old_one_when_it_is_used(self) -> None:
        store = MemoryStore()
        access = await access_of(store)
        enrolled = await access.enrol("fleet-secret", Enrol())
        client = await access.authenticate(enrolled.credential)
        new = (await access.rotate(client, enrolled.credential)).credential
        for _ in range(2):  # The answer may be lost on its way.
            assert (await access.authenticate(enrolled.credential)).index == client.index
        assert (await access.authenticate(new)).index == client.index
        await refused(access, enrolled.credential)
        assert (await access.authenticate(new)).previous_sha256 is None

    async def test_lost_answers_lock_no_client_out(self) -> None:
        access = await access_of()
        old = (await access.enrol("fleet-secret", Enrol())).credential
        client = await access.authenticate(old)
        lost = [(await access.rotate(client, old)).credential for _ in range(3)]
        kept = (await access.rotate(await access.authenticate(old), old)).credential
        await access.authenticate(kept)
        for credential in [old, *lost]:
            await refused(access, credential)

    async def test_another_replica_drops_the_old_one_too(self) -> None:
        store = CountedStore()
        store.several = True
        here, there = await access_of(store), await access_of(store)
        old = (await here.enrol("fleet-secret", Enrol())).credential
        new = (await here.rotate(await here.authenticate(old), old)).credential
        await there.authenticate(old)
        await here.authenticate(new)
        assert len(store.published) == 3  # enrolled, renewed, the old one retired
        await there.reload(0)
        await refused(there, old)

    async def test_what_was_replaced_cannot_be_rotated(self) -> None:
        access = await access_of()
        old = (await access.enrol("fleet-secret", Enrol())).credential
        client = await access.authenticate(old)
        new = (await access.rotate(client, old)).credential
        await access.authenticate(new)
        with pytest.raises(ProblemError) as caught:
            await access.rotate(replace(client), old)
        assert caught.value.code == "unauthorized"
        await access.authenticate(new)


class TestPeople:
    def authority(self) -> Authority:
        return Authority(
            admin_token="root-secret",
            admin_tokens=[
                AdminToken(token=SecretStr("v"), name="v", role="viewer", runs=("acme-*",)),
                AdminToken(token=SecretStr("o"), name="o", role="operator"),
            ],
        )

    @pytest.mark.parametrize(
        ("token", "role", "code"),
        [("v", "viewer", None), ("v", "operator", "forbidden"), ("v", "admin", "forbidden"),
         ("o", "viewer", None), ("o", "operator", None), ("o", "admin", "forbidden"),
         ("root-secret", "viewer", None), ("root-secret", "admin", None),
         ("nobody", "viewer", "unauthorized"), ("", "viewer", "unauthorized"),
         (None, "viewer", "unauthorized")],
    )  # fmt: skip
    def test_a_role_allows_what_lesser_ones_do(
        self, token: str | None, role: tokens.Role, code: str | None
    ) -> None:
        if code is None:
            assert self.authority().check(token, role) == self.authority().person(token)
        else:
            with pytest.raises(ProblemError) as caught:
                self.authority().check(token, role)
            assert caught.value.code == code

    def test_without_people_it_is_forbidden(self) -> None:
        with pytest.raises(ProblemError, match="no admin token configured"):
            Authority().check("any", "viewer")

    def test_people_and_devices_are_apart(self) -> None:
        with pytest.raises(ValueError, match="must not also be an enrolment token"):
            Authority(enrolment_tokens=["same"], admin_token="same")
        with pytest.raises(ValueError, match="cannot limit role admin"):
            AdminToken(token=SecretStr("a"), name="a", role="admin", runs=("acme-*",))

    def test_every_secret_is_compared_in_constant_time(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compared: list[tuple[str, str]] = []

        def compare(given: str, known: str) -> bool:
            compared.append((given, known))
            return given == known

        monkeypatch.setattr(tokens.hmac, "compare_digest", compare)
        people = {digest("v"), digest("o"), digest("root-secret")}
        for token in ("v", "nobody"):
            compared.clear()
            self.authority().person(token)
            assert {known for _, known in compared} == people
            assert {given for given, _ in compared} == {digest(token)}


@pytest.mark.parametrize(
    ("patterns", "run_id", "seen"),
    [(None, "any", True), (("acme-*",), "acme-1", True), (("acme-*",), "acme", False),
     (("acme-*",), "other-acme-1", False), (("a", "b"), "b", True), (("a",), "A", False),
     (("*",), "any", True), ((), "any", False)],
)  # fmt: skip
def test_patterns_name_runs(patterns: tuple[str, ...] | None, run_id: str, seen: bool) -> None:
    assert may_see(patterns, run_id) is seen
