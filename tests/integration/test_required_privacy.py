"""A device's privacy requirements, and its own count of epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Service
from fedone_sdk.client import RequiredPrivacy
from fedone_sdk.client.noise import PrivacyAccount
from fedone_sdk.client.options import OnEvent
from fedone_sdk.client.state import DeviceState, Identity, Journal
from fedone_sdk.errors import DataError, SpecError
from fedone_sdk.local import MemoryTransport
from fedone_sdk.messages import RunTask
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from tests.edge import edge_client, entries, stored
from tests.integration.test_edge_resume import DATA, serving, spec_of
from tests.power import Disk
from tests.runs import TOKEN, RecordingTransport

dp_accounting = pytest.importorskip("dp_accounting")

EXCHANGES = ["losses", "alpha"]


def noisy(
    exchange: str = "losses", *, rounds: int = 1, local_steps: int = 1, **privacy: Any
) -> RunSpec:
    document = spec_of(exchange, rounds=rounds, local_steps=local_steps).model_dump(mode="json")
    privacy = {"clip": 2.0, "noise_multiplier": 4.0, **privacy}
    return RunSpec.model_validate({**document, "privacy": privacy})


def epsilon_of(*multipliers: float, delta: float = 1e-5) -> float:
    """By the library's own composition, independent of the device's shortcut."""
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    for multiplier in multipliers:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier))
    return float(accountant.get_epsilon(delta))


class Misreporting(RecordingTransport):
    """Tells a device of another task than its run's."""

    def __init__(self, service: Service, **lies: object) -> None:
        super().__init__(service)
        self.lies = lies

    async def task(self, credential: str, run_id: str) -> RunTask:
        return (await super().task(credential, run_id)).model_copy(update=self.lies)


def device(
    transport: MemoryTransport,
    folder: Path | None,
    *,
    own: bool = True,
    on_event: OnEvent | None = None,
    **required: Any,
) -> EdgeClient:
    required = {"max_epsilon": 8.0, **required}
    return edge_client(
        "memory:",
        token=TOKEN,
        data=DATA,
        label="label",
        fields=("text",),
        backend=ScriptedBackend() if own else None,
        state_dir=folder,
        require_privacy=RequiredPrivacy(**required),
        transport=transport,
        on_event=on_event,
        wait_s=0.0,
    )


@pytest.mark.parametrize(
    ("spec", "required", "reason"),
    [
        (spec_of("losses"), {}, "requires noise, and the run asks for none"),
        (noisy(), {"min_noise_multiplier": 4.5}, "of at least 4.5, and the run's is 4"),
        (noisy(), {"unit": "device"}, "requires target alpha"),
        (noisy(noise_multiplier=0.5), {}, "exceed the client's max"),
        (noisy("alpha", local_steps=64), {}, "exceed the client's max"),
        (noisy("alpha", target="alpha", noise_multiplier=0.5), {}, "exceed the client's max"),
    ],
)
async def test_work_below_the_requirement_is_declined(
    tmp_path: Path, spec: RunSpec, required: dict[str, Any], reason: str
) -> None:
    async with serving(spec, ScriptedBackend()) as service:
        transport = RecordingTransport(service)
        async with device(transport, tmp_path, **required) as client:
            assert (await client.run_once()).outcome == "declined"
            assert (await client.run_once()).outcome == "idle"  # it is offered no more
            assert client.epsilon == 0.0
        assert [reason in message.reason for message in transport.declines] == [True]
        assert all("client" in message.reason for message in transport.declines)
        assert transport.updates == []


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_a_device_counts_its_own_epsilon(tmp_path: Path, exchange: str) -> None:
    spec = noisy(exchange, rounds=3)
    async with serving(spec, ScriptedBackend()) as service:
        transport = RecordingTransport(service)
        for rounds in range(1, 4):  # a restart each time
            async with device(transport, tmp_path) as client:
                assert client.epsilon == pytest.approx(epsilon_of(*[4.0] * (rounds - 1)), rel=0.02)
                assert (await client.run_once()).outcome == "worked"
                assert client.epsilon == pytest.approx(epsilon_of(*[4.0] * rounds), rel=0.02)
        privacy = service.runs["run"].result().privacy
    assert privacy is not None
    assert client.epsilon == pytest.approx(privacy.epsilon)
    # Another server, and other noise: all of it is of the same data.
    other = noisy("alpha", target="alpha", noise_multiplier=8.0)
    async with serving(other, ScriptedBackend()) as service:
        client = edge_client(
            "memory:other",
            token=TOKEN,
            data=DATA,
            label="label",
            fields=("text",),
            backend=ScriptedBackend(),
            state_dir=tmp_path,
            require_privacy=RequiredPrivacy(max_epsilon=8.0, delta=1e-6),
            transport=MemoryTransport(service),
        )
        async with client:
            assert (await client.run_once()).outcome == "worked"
        wanted = epsilon_of(4.0, 4.0, 4.0, 8.0, delta=1e-6)
        assert client.epsilon == pytest.approx(wanted, rel=0.02)
    # What protects one example does not protect all of them.
    async with device(transport, tmp_path, unit="device") as client:
        assert client.epsilon == math.inf


async def test_it_stops_at_its_epsilon_and_not_at_the_servers(tmp_path: Path) -> None:
    spec = noisy(rounds=5, max_epsilon=1e6, delta=0.5)
    async with serving(spec, ScriptedBackend()) as service:
        transport = RecordingTransport(service)
        async with device(transport, tmp_path, max_epsilon=1.5) as client:
            outcomes = [(await client.run_once()).outcome for _ in range(3)]
            assert client.epsilon == pytest.approx(epsilon_of(4.0, 4.0), rel=0.02)
    assert outcomes == ["worked", "worked", "declined"]
    assert epsilon_of(4.0, 4.0) < 1.5 < epsilon_of(4.0, 4.0, 4.0)
    # Without figures, which would tell of other servers' runs.
    reason = "this work would exceed the client's maximal epsilon"
    assert transport.declines[0].reason == reason


class FullDisk:
    """A disk that is full while `full` is set."""

    full = False

    def __call__(self, what: str) -> None:
        if self.full and what.startswith(("before open", "before write")):
            raise OSError(28, "No space left on device")

    @contextmanager
    def during(self, kind: type, method: str) -> Iterator[None]:
        """Let the disk be full during a method."""
        real = getattr(kind, method)

        def called(*arguments: Any, **more: Any) -> Any:
            self.full = True
            try:
                return real(*arguments, **more)
            finally:
                self.full = False

        with mock.patch.object(kind, method, called):
            yield


@pytest.mark.parametrize(
    ("exchange", "target"), [("losses", "losses"), ("alpha", "losses"), ("alpha", "alpha")]
)
async def test_noise_that_cannot_be_kept_is_not_sent(
    tmp_path: Path, exchange: str, target: str
) -> None:
    """After a restart the same work would get other noise."""
    full = FullDisk()
    async with serving(noisy(exchange, target=target), ScriptedBackend()) as service:
        transport = RecordingTransport(service)
        with Disk(tmp_path, full):
            async with device(transport, tmp_path) as client:
                await client.enrol()
                with full.during(Journal, "release"):
                    assert (await client.run_once()).reason == "the noise cannot be stored"
                assert transport.updates == []
                assert transport.declines[0].usage.queries > 0
                # Noise and its count are stored together, or neither is.
                assert stored(tmp_path, "SELECT target FROM privacy") == []
                assert (await client.run_once()).outcome == "worked"


def account_in(folder: Path, server: str = "memory:") -> PrivacyAccount:
    state = DeviceState(folder, server)
    return PrivacyAccount(RequiredPrivacy(max_epsilon=8), state, own_model=True)


@pytest.mark.parametrize("precision", [-1.0, "much", None, b"1", "NaN"])
def test_a_wrong_count(tmp_path: Path, precision: object) -> None:
    account_in(tmp_path)
    stored(tmp_path, "INSERT INTO privacy VALUES ('losses', ?)", precision)
    with pytest.raises(DataError, match=r"state.sqlite3: the count of epsilon cannot be read"):
        account_in(tmp_path)


def test_a_damaged_file_may_have_a_count(tmp_path: Path) -> None:
    """Also after a client that counts nothing has started another file."""
    account_in(tmp_path)
    file = tmp_path / "state.sqlite3"
    file.write_bytes(file.read_bytes()[:6000])
    DeviceState(tmp_path, "memory:").identity = Identity(nonce="nonce")
    assert len(entries(tmp_path, "identity")) == 1
    for _ in range(2):
        with pytest.raises(DataError, match=r"state.sqlite3.damaged: the count of epsilon"):
            account_in(tmp_path)
    (tmp_path / "state.sqlite3.damaged").unlink()
    assert account_in(tmp_path).epsilon == 0.0


async def test_tokens_tell_of_texts_and_stay(tmp_path: Path) -> None:
    async with serving(noisy(), ScriptedBackend()) as service:
        transport = RecordingTransport(service)
        async with device(transport, tmp_path) as client:
            assert (await client.run_once()).outcome == "worked"
        (update,) = transport.updates
        assert update.usage.queries == 40
        assert update.usage.requests == 40
        assert (update.usage.prompt_tokens, update.usage.completion_tokens) == (0, 0)
    async with serving(noisy(), ScriptedBackend()) as service:
        transport = RecordingTransport(service)
        client = edge_client(
            "memory:", token=TOKEN, data=DATA, backend=ScriptedBackend(), transport=transport
        )
        async with client:
            assert (await client.run_once()).outcome == "worked"
            assert client.epsilon is None
        (update,) = transport.updates
        assert update.usage.prompt_tokens > 0


# A server that lies


@pytest.mark.parametrize("required", [True, False])
async def test_a_target_without_noise_in_this_exchange(tmp_path: Path, required: bool) -> None:
    """Noise on alpha protects nothing where losses are returned."""
    spec = noisy("losses")
    assert spec.privacy is not None
    changed = spec.privacy.model_copy(update={"target": "alpha"})
    async with serving(spec, ScriptedBackend()) as service:
        transport = Misreporting(service, privacy=changed)
        own = {"require_privacy": RequiredPrivacy(max_epsilon=8.0)} if required else {}
        options: dict[str, Any] = {
            "label": "label",
            "fields": ["text"],
            "state_dir": tmp_path,
            **own,
        }
        options |= {"backend": ScriptedBackend(), "transport": transport}
        client = edge_client("memory:", token=TOKEN, data=DATA, **options)
        async with client:
            turn = await client.run_once()
    assert transport.updates == []
    assert turn.reason == "the run's privacy does not fit its exchange"


async def test_a_memory_without_noise() -> None:
    spec = noisy("alpha")
    assert spec.privacy is not None
    changed = spec.privacy.model_copy(update={"target": "alpha"})
    search = {"name": "random", "num_samples": 4, "batch_size": 4}
    document = noisy("losses").model_dump(mode="json")
    method = RunSpec.model_validate({**document, "method": search}).method
    async with serving(spec, ScriptedBackend()) as service:
        transport = Misreporting(service, privacy=changed, method=method)
        client = edge_client("memory:", token=TOKEN, data=DATA, transport=transport)
        async with client:
            assert (await client.run_once()).outcome == "declined"
    assert transport.updates == []


# Through the gateway


async def test_the_gateway_sees_texts_and_labels_can_be_protected(tmp_path: Path) -> None:
    async with serving(noisy(), ScriptedBackend()) as service:
        transport = RecordingTransport(service)
        for unit in ("example", "device"):
            with pytest.raises(SpecError, match=f"unit '{unit}' needs a backend"):
                device(transport, tmp_path, own=False, unit=unit)
        async with device(transport, tmp_path, own=False, unit="label") as client:
            assert (await client.run_once()).outcome == "worked"
            assert client.epsilon == pytest.approx(epsilon_of(4.0), rel=0.02)
        assert len(transport.updates) == 1


@pytest.mark.parametrize(
    ("local_steps", "outcome"), [(1, "worked"), (2, "declined")], ids=["one step", "two steps"]
)
async def test_later_prompts_show_alpha_to_the_gateway(
    tmp_path: Path, local_steps: int, outcome: str
) -> None:
    spec = noisy("alpha", target="alpha", local_steps=local_steps)
    for own in (True, False):
        async with serving(spec, ScriptedBackend()) as service:
            transport = RecordingTransport(service)
            folder = tmp_path / str(own)
            async with device(transport, folder, own=own, unit="label") as client:
                assert (await client.run_once()).outcome == ("worked" if own else outcome)
                assert all("one local step" in each.reason for each in transport.declines)


async def test_references_are_labels(tmp_path: Path) -> None:
    spec = noisy()
    async with serving(spec, ScriptedBackend()) as service:
        nll = spec.task.model_copy(update={"loss": "nll"})
        transport = Misreporting(service, task=nll)
        async with device(transport, tmp_path, own=False, unit="label") as client:
            assert (await client.run_once()).outcome == "declined"
    assert "loss nll sends them" in transport.declines[0].reason


def test_it_needs_a_folder() -> None:
    required = RequiredPrivacy(max_epsilon=8)
    with pytest.raises(SpecError, match=r"policy\.privacy: needs state_dir"):
        edge_client("http://x", data=DATA, require_privacy=required)
