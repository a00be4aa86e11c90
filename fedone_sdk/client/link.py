"""The line from a device to its server: who calls, how patiently, and whether it is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import structlog

from fedone_sdk.client.events import EventSink
from fedone_sdk.client.identity import Identity
from fedone_sdk.client.outbox import Unsent
from fedone_sdk.client.patience import RetryPolicy
from fedone_sdk.client.transport import Idle, Transport, new_private_key, public_key_of
from fedone_sdk.client.work import Assigned
from fedone_sdk.errors import MessageError, ProblemError, SpecError, TransportError
from fedone_sdk.messages import (
    Claim,
    Decline,
    Enrol,
    Renewal,
    RunTask,
    Score,
    Scores,
    VocabularyList,
)

if TYPE_CHECKING:
    from fedone_sdk.messages import RunSummary

__all__ = ["RetryingTransport"]

_log = structlog.get_logger(__name__)

_LONG_S = 4.0
"""After so many seconds without an answer the log says so."""

T = TypeVar("T")


class RetryingTransport:
    """The calls of one device, repeated while they fail for reasons that pass.

    All but `enrol` and `aclose` raise `TransportError`, `MessageError` and `ProblemError` as the
    transport does.

    Args:
        transport: Reaches the server.
        identity: Who calls.
        token: Enrols the device; None where it has an identity.
        name: What people may call the device.
        sign: Whether a device that enrols makes a key to sign with.
        teller: Told of the enrolment, and when the line goes down or comes up.
        pause: Waits so many seconds, or less when the client stops.
        stopping: Whether the client stops.

    Attributes:
        transport: As given.
        identity: As given.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        *,
        token: str | None,
        name: str | None,
        sign: bool,
        teller: EventSink,
        pause: Callable[[float], Awaitable[None]],
        stopping: Callable[[], bool],
    ) -> None:
        self.transport = transport
        self.identity = identity
        self._token = token
        self._name = name
        self._sign = sign
        self._teller = teller
        self._signed_as: str | None = None
        self._down_since: float | None = None
        self._patience = RetryPolicy(
            pause=pause, stopping=stopping, failed=self._failed, succeeded=self._succeeded
        )

    @property
    def may_enrol_again(self) -> bool:
        """Whether a device whose identity is refused can get another."""
        return self._token is not None and bool(self.credential)

    @property
    def credential(self) -> str:
        """The device's; empty until it has enrolled."""
        return self.identity.credential or ""

    async def enrol(self) -> None:
        """Makes sure that the device has an identity.

        Raises:
            MissingExtraError: It shall sign, and cannot.
            ProblemError: The token is not valid.
            SpecError: There is neither an identity nor a token, or nothing enrols at this URL.
            TransportError: The server cannot be reached.
        """
        if not self.credential:
            token = self._token
            if token is None:
                raise SpecError(
                    "token: is required until the device has enrolled", source="arguments"
                )
            key = self.identity.private_key or (new_private_key() if self._sign else None)
            message = Enrol(
                name=self._name,
                nonce=self.identity.nonce(key),
                public_key=None if key is None else public_key_of(key),
            )
            with self._impatient(), self._at_an_aggregator():
                self.identity.enrolled(
                    await self._patience.persist(lambda: self.transport.enrol(token, message))
                )
            self._teller.tell("enrolled")
        key, client_id = self.identity.private_key, self.identity.client_id
        if key is not None and client_id is not None and self._signed_as != client_id:
            self.transport.sign_as(client_id, key)
            self._signed_as = client_id

    async def rotate(self) -> None:
        """Exchanges the credential."""
        answer = await self._call(self.transport.rotate)
        self.identity.renew(answer.credential)

    async def claim(self, message: Claim) -> Assigned | Idle:
        """Asks for work."""
        return await self._call(lambda who: self.transport.claim(who, message))

    async def runs(self) -> Sequence[RunSummary]:
        """Lists the runs that the device may work for."""
        return await self._call(self.transport.runs)

    async def task(self, run_id: str) -> RunTask:
        """Fetches what must be known of a run."""
        return await self._call(lambda who: self.transport.task(who, run_id))

    async def vocabulary(self, run_id: str, after: int = 0) -> VocabularyList:
        """Fetches a run's candidates; with a version of them, those that were added since."""
        return await self._call(lambda who: self.transport.vocabulary(who, run_id, after))

    async def score(self, message: Score) -> Scores:
        """Asks the gateway."""
        return await self._call(lambda who: self.transport.score(who, message))

    async def update(self, unsent: Unsent) -> None:
        """Returns finished work."""
        await self._call(
            lambda who: self.transport.update(who, unsent.assignment_id, unsent.update)
        )

    async def renew(self, assignment_id: str) -> Renewal:
        """Asks for another deadline."""
        return await self._call(lambda who: self.transport.renew(who, assignment_id))

    async def decline(self, assignment_id: str, message: Decline) -> None:
        """Gives work back."""
        await self._call(lambda who: self.transport.decline(who, assignment_id, message))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self.transport.aclose()

    def is_down(self, reason: Exception) -> None:
        """Says that the server cannot be reached, if it was not said yet."""
        if self._down_since is None:
            self._down_since = time.time()
            _log.warning(f"offline since {_hour(self._down_since)}", reason=str(reason))
            self._teller.tell("offline", reason=str(reason))

    @contextmanager
    def _impatient(self) -> Iterator[None]:
        """Says in the log when the first call takes long: an address may lead nowhere."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(
            _LONG_S, lambda: _log.warning("no answer yet", server=self.identity.server)
        )
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _at_an_aggregator(self) -> Iterator[None]:
        """Names the address where an aggregator answers that enrolment is not there."""
        try:
            yield
        except ProblemError as exc:
            if exc.code != "not_found":
                raise
            raise SpecError(
                f"server: {self.identity.server} is not the base URL of an aggregator: "
                f"{exc.detail}; allowed is http(s)://HOST[:PORT] and the path that a proxy adds",
                source="arguments",
            ) from exc

    async def _call(self, call: Callable[[str], Awaitable[T]]) -> T:
        return await self._patience.persist(lambda: call(self.credential))

    def _failed(self, exc: Exception) -> None:
        if isinstance(exc, (TransportError, MessageError)):
            self.is_down(exc)

    def _succeeded(self) -> None:
        if self._down_since is not None:
            _log.info("online again", offline_since=_hour(self._down_since))
            self._down_since = None
            self._teller.tell("online")


def _hour(at: float) -> str:
    """The device's own time of day."""
    return time.strftime("%H:%M", time.localtime(at))
