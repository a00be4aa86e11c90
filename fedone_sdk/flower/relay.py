"""The node's end: a transport that knows the answers so far, and waits at the first other call."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from fedone_sdk.client import EdgeClient, Idle
from fedone_sdk.errors import ProblemError, is_retryable
from fedone_sdk.flower.letters import PROBLEM, Item, Kind, item_of, parse
from fedone_sdk.messages import (
    ASSIGNMENT,
    AlphaAssignment,
    AlphaUpdate,
    Claim,
    Decline,
    Enrol,
    Enrolled,
    LossesAssignment,
    LossesUpdate,
    Message,
    Problem,
    Receipt,
    Renewal,
    Rotated,
    RunSummary,
    RunTask,
    Score,
    Scores,
    VocabularyList,
)

__all__ = ["Relay", "turn"]

_OUTCOMES = {
    "idle": "it has no examples",
    "paused": "its app's condition (only_when) does not hold",
    "offline": "what the server sent cannot be read",
    "refused": "its work was refused",
}


class Relay:
    """A `Transport` whose server is somebody who writes now and then.

    SuperLink knows who a node is, so that it needs no credential of the aggregator's.

    Args:
        name: The node's.
        answers: To the calls of this turn, in the order in which they were made.

    Attributes:
        asked: The call that has no answer yet, once the client has made it.
        given_back: The work that the client does not do, and why.
    """

    def __init__(self, name: str, answers: Iterable[Item]) -> None:
        self.asked: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        self.given_back: Item | None = None
        self._name = name
        self._answers: dict[tuple[Kind, str], deque[Item]] = defaultdict(deque)
        for answer in answers:
            self._answers[answer.kind, answer.subject].append(answer)

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        """Takes the node's own name; the strategy enrols it."""
        return Enrolled(client_id=self._name, credential=self._name)

    def sign_as(self, client_id: str, private_key: str) -> None:
        """Nothing to sign: SuperLink authenticates nodes."""

    async def rotate(self, credential: str) -> Rotated:
        """There is nothing to exchange."""
        return Rotated(credential=credential)

    async def claim(
        self, credential: str, message: Claim
    ) -> AlphaAssignment | LossesAssignment | Idle:
        """Asks for work."""
        return parse(ASSIGNMENT.validate_json, await self._call("claim", "", message))

    async def runs(self, credential: str) -> Sequence[RunSummary]:
        """None: a node learns of a run with its work."""
        return ()

    async def task(self, credential: str, run_id: str) -> RunTask:
        """Asks what must be known of a run."""
        return parse(RunTask.model_validate_json, await self._call("task", run_id))

    async def vocabulary(self, credential: str, run_id: str, after: int = 0) -> VocabularyList:
        """Asks for a run's candidates, all of them whatever is known."""
        return parse(VocabularyList.model_validate_json, await self._call("vocabulary", run_id))

    async def score(self, credential: str, message: Score) -> Scores:
        """Asks the model that the server has."""
        # By its digest: what the client has in its journal it does not ask again.
        body = item_of("score", "", message).body
        digest = hashlib.sha256(body.content).hexdigest()
        return parse(Scores.model_validate_json, await self._call("score", digest, message))

    async def update(
        self, credential: str, assignment_id: str, message: AlphaUpdate | LossesUpdate
    ) -> Receipt:
        """Returns finished work; the receipt comes with the node's next work."""
        answer = await self._call("update", assignment_id, message)
        return parse(Receipt.model_validate_json, answer)

    async def renew(self, credential: str, assignment_id: str) -> Renewal:
        """Cannot be had: who replies once cannot ask for more time before."""
        raise ProblemError("renewal_refused", "a Flower message has the deadline that it came with")

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None:
        """Gives work back, with the reply."""
        self.given_back = item_of("decline", assignment_id, message)

    async def aclose(self) -> None:
        """Nothing to close."""

    async def _call(self, kind: Kind, subject: str, message: Message | None = None) -> Item:
        known = self._answers[kind, subject]
        while known:
            answer = known.popleft()
            if answer.body.content_type != PROBLEM:
                return answer
            error = parse(Problem.model_validate_json, answer).error()
            if not (known and is_retryable(error)):  # else it was waited for already
                raise error
        if not self.asked.done():
            self.asked.set_result(item_of(kind, subject, message))
        # As on a device that is put to sleep amid its work: it wakes up in another turn.
        asleep: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        return await asleep


async def turn(client: EdgeClient, relay: Relay) -> Item:
    """Lets a client do one turn, up to the first call that the server has to answer.

    Args:
        client: With `relay` for its transport.
        relay: Holds the answers so far.

    Returns:
        The call; a ``decline`` of no assignment where the node cannot work.

    Raises:
        Exception: What the app's functions raise.
    """
    async with client:
        working = asyncio.create_task(client.run_once(), name="turn")
        try:
            waits: set[asyncio.Future[Any]] = {working, relay.asked}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if relay.asked.done():
                return relay.asked.result()
            outcome = working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    reason = _OUTCOMES.get(outcome, outcome)
    return relay.given_back or item_of("decline", "", Decline(reason=reason))
