"""`fedone tokens` and `fedone clients`, against a real server."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fedone_sdk.aggregator import Aggregator
from fedone_sdk.errors import ProblemError, SpecError
from fedone_sdk.messages import Enrol
from fedone_sdk.stores import MemoryStore
from tests.console import invoked

ROOT = "root-secret-19ab"


class Fedone(NamedTuple):
    """The commands with the server and its token filled in."""

    aggregator: Aggregator
    url: str
    folder: Path

    async def __call__(self, *arguments: str, token: str = ROOT) -> str:
        return await invoked(*arguments, "--server", self.url, admin_token=token)

    async def json(self, *arguments: str) -> object:
        file = self.folder / "out.json"
        await self(*arguments, "--json", str(file))
        return json.loads(file.read_text())


@pytest.fixture
async def fedone(tmp_path: Path) -> AsyncIterator[Fedone]:
    async with Aggregator(
        store=MemoryStore(), enrolment_tokens=["fleet-secret"], admin_token=ROOT
    ) as aggregator:
        yield Fedone(aggregator, await aggregator.listen(), tmp_path)


async def test_a_token_is_made_used_and_revoked(fedone: Fedone) -> None:
    shown = await fedone(
        "tokens", "create", "acme", "--run", "acme-*", "--run", "demo", "--uses", "2",
        "--expires-in", "12h",
    )  # fmt: skip
    secret = re.search(r"token +(fedone_enrol_\S+)", shown)[1]
    assert re.search(r"runs +acme-\* demo\n +uses left +2\n +expires +20\d\d-", shown)
    enrolled = await fedone.aggregator.service.access.enrol(secret, Enrol(name="phone"))

    listed = await fedone("tokens", "list")
    assert re.search(r"config:1 +all +unlimited +never +no\n", listed)
    assert re.search(r"acme +acme-\* demo +1 +20\d\d-\S+ \S+Z +no\n", listed)
    assert secret not in listed
    assert await fedone("tokens", "revoke", "acme") != ""
    revoked = await fedone.json("tokens", "list")
    assert [token["revoked_at"] is None for token in revoked] == [True, False]

    clients = await fedone("clients", "list")
    assert re.search(rf"{enrolled.client_id} +phone +acme +acme-\* demo +20", clients)
    assert enrolled.credential not in clients
    await fedone("clients", "revoke", enrolled.client_id)
    with pytest.raises(ProblemError, match="this client was revoked"):
        await fedone.aggregator.service.access.authenticate(enrolled.credential)
    (client,) = await fedone.json("clients", "list")
    assert client["revoked_at"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tokens", "create", "a", "--expires-in", "soon"], "--expires-in: must be a number with"),
        (["tokens", "create", "a:b"], "name: "),
        (["tokens", "create", "a", "--run", "a/b"], "runs.0: "),
    ],
)
async def test_mistakes_are_reported_before_any_request(
    fedone: Fedone, arguments: list[str], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        await fedone(*arguments)
    assert message in str(caught.value)
    assert len(await fedone.aggregator.service.store.tokens()) == 1


async def test_refusals_are_the_server_s(fedone: Fedone) -> None:
    for arguments in (("tokens", "revoke", "none"), ("clients", "revoke", "client-none")):
        with pytest.raises(ProblemError, match="not_found: there is no"):
            await fedone(*arguments)
    with pytest.raises(ProblemError, match="unauthorized: "):
        await fedone("tokens", "list", token="wrong")
