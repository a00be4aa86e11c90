"""The node side: a transport that replays earlier answers, and stops at the first new call."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedone_sdk.client import EdgeClient, Idle
from fedone_sdk.errors import ProblemError, is_retryable
from fedone_sdk.flower.wire import PROBLEM, Item, Kind, item_of, parse
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

_OUTCOMES = {
    "idle": "it has no examples",
    "paused": "its app's condition (only_when) does not hold",
    "offline": "what the server sent cannot be read",
    "refused": "its work was refused",
}


class Relay:
    """A `Transport` that is answered by Flower messages.

    SuperLink authenticates nodes, so no credential of the aggregator is needed.

    Args:
        name: The node's.
        answers: To the calls of this turn, in call order.

    Attributes:
        asked: The first call without an answer, once the client has made it.
        given_back: The client's decline of its work, with the reason.
    """

    def __init__(self, name: str, answers: Iterable[Item]) -> None:
        self.asked: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        self.given_back: Item | None = None
        self._name = name
        self._answers: dict[tuple[Kind, str], deque[Item]] = defaultdict(deque)
        for answer in answers:
            self._answers[answer.kind, answer.subject].append(answer)

    async def enrol(self, token: str, message: Enrol) -> Enrolled:
        """Return the node's name; the strategy enrols it."""
        return Enrolled(client_id=self._name, credential=self._name)

    async def rotate(self, credential: str) -> Rotated:
        """Not available: there is no credential."""
        return Rotated(credential=credential)

    async def claim(
        self, credential: str, message: Claim
    ) -> AlphaAssignment | LossesAssignment | Idle:
        """Claim an assignment."""
        return parse(ASSIGNMENT.validate_json, await self._call("claim", "", message))

    async def runs(self, credential: str) -> Sequence[RunSummary]:
        """None: a node learns of a run with its work."""
        return ()

    async def task(self, credential: str, run_id: str) -> RunTask:
        """Fetch a run's task."""
        return parse(RunTask.model_validate_json, await self._call("task", run_id))

    async def vocabulary(self, credential: str, run_id: str, after: int = 0) -> VocabularyList:
        """Fetch all of a run's candidates; `after` is ignored."""
        return parse(VocabularyList.model_validate_json, await self._call("vocabulary", run_id))

    async def score(self, credential: str, message: Score) -> Scores:
        """Score with the server's model."""
        # Keyed by digest, because the client does not repeat queries that are in its journal.
        body = item_of("score", "", message).body
        digest = hashlib.sha256(body.content).hexdigest()
        return parse(Scores.model_validate_json, await self._call("score", digest, message))

    async def update(
        self, credential: str, assignment_id: str, message: AlphaUpdate | LossesUpdate
    ) -> Receipt:
        """Send an update; its receipt comes with the node's next work."""
        answer = await self._call("update", assignment_id, message)
        return parse(Receipt.model_validate_json, answer)

    async def renew(self, credential: str, assignment_id: str) -> Renewal:
        """Refuse: a node replies once and cannot request more time before."""
        raise ProblemError("renewal_refused", "a Flower message has the deadline that it came with")

    async def decline(self, credential: str, assignment_id: str, message: Decline) -> None:
        """Decline work, with the reply."""
        self.given_back = item_of("decline", assignment_id, message)

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""

    async def _call(self, kind: Kind, subject: str, message: Message | None = None) -> Item:
        known = self._answers[kind, subject]
        while known:
            answer = known.popleft()
            if answer.body.content_type != PROBLEM:
                return answer
            error = parse(Problem.model_validate_json, answer).error()
            if not (known and is_retryable(error)):  # otherwise the wait is already over
                raise error
        if not self.asked.done():
            self.asked.set_result(item_of(kind, subject, message))
        # Like a device that is suspended during its work and resumes in another turn.
        asleep: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        return await asleep


async def turn(client: EdgeClient, relay: Relay) -> Item:
    """Run a client's turn, up to the first call that the server must answer.

    Returns:
        The call; a ``decline`` without an assignment if the node cannot work.

    Raises:
        Exception: An exception of the app's functions.
    """
    async with client:
        working = asyncio.create_task(client.run_once(), name="turn")
        try:
            waits: set[asyncio.Future[Any]] = {working, relay.asked}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if relay.asked.done():
                return relay.asked.result()
            outcome = working.result().outcome
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    reason = _OUTCOMES.get(outcome, outcome)
    return relay.given_back or item_of("decline", "", Decline(reason=reason))


Kept = dict[str, bytes]
"""File contents by path, the oldest first."""


@contextmanager
def kept_folder(before: Mapping[str, bytes]) -> Iterator[tuple[Path, Kept]]:
    """Create a folder with the stored files, for the duration of one message.

    Yields:
        The folder, and its files at the end of the ``with`` block.
    """
    after: Kept = {}
    with TemporaryDirectory(prefix="fedone-node-") as name:
        folder = Path(name)
        for path, content in before.items():
            file = folder / path
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_bytes(content)
        yield folder, after
        files = [file for file in folder.rglob("*") if file.is_file()]
        # The client drops the oldest files if there are too many.
        for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            after[file.relative_to(folder).as_posix()] = file.read_bytes()
