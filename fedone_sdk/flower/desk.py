"""The server's end: the aggregator's service, which answers the calls of Flower's nodes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import structlog

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.aggregator.pool import STAY_S, TurnedAway
from fedone_sdk.backends import LLMBackend
from fedone_sdk.budget import Usage
from fedone_sdk.errors import MessageError, ProblemError, SpecError
from fedone_sdk.flower.letters import PROBLEM, Item, item_of, parse, refusal
from fedone_sdk.messages import (
    UPDATE,
    AlphaAssignment,
    Claim,
    Decline,
    Enrol,
    LossesAssignment,
    Score,
    VocabularyList,
)
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClientRecord, Store
from fedone_sdk.task import Example, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["Desk", "Tuning"]

_log = structlog.get_logger(__name__)

_MOST_SETTLED = 16
"""Answers to finished work that wait for a node's next work; a client keeps as many updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is to be done.

    Attributes:
        spec: The run.
        vocabulary: Its candidates.
        backend: The model that the server has; None where nodes have models of their own.
        dev: Held-out examples.
        score: The user's function, for loss ``score``.
        measure: The user's function, for a metric of their own.
        store: Where the run is kept; None is in memory.
    """

    spec: RunSpec
    vocabulary: Vocabulary
    backend: LLMBackend | None = None
    dev: Sequence[Example] = ()
    score: ScoreFunction | None = None
    measure: MetricFunction | None = None
    store: Store | None = None

    def check(self) -> None:
        """Looks whether all is there that the run needs here.

        Raises:
            SpecError: Something is missing.
        """
        task = self.spec.task
        if self.dev and self.backend is None:
            raise SpecError("dev: is measured by the server's model, so it needs a backend here")
        if self.dev and task.loss == "score" and self.score is None:
            raise SpecError("task.score: loss score needs a score function")
        if self.dev and ":" in task.metric and self.measure is None:
            raise SpecError(f"task.metric: {task.metric} needs the function measure")


@dataclass(slots=True, kw_only=True)
class _Errand:
    """Work that a node has.

    Attributes:
        work: The assignment.
        answers: To the calls that the node has made for it.
    """

    work: AlphaAssignment | LossesAssignment
    answers: list[Item]

    def has_answer(self, call: Item) -> bool:
        """Whether a call was answered, and not by a refusal, which may pass."""
        return any(
            answer.kind == call.kind == "score"
            and answer.subject == call.subject
            and answer.body.content_type != PROBLEM
            for answer in self.answers
        )


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node that has enrolled.

    Attributes:
        node_id: Flower's.
        client: The aggregator's.
        held: How many examples it holds.
        errand: What it works at.
        settled: Answers to earlier updates, which it is told with its next work.
    """

    node_id: int
    client: ClientRecord
    held: int
    errand: _Errand | None = None
    settled: dict[str, Item] = field(default_factory=dict)


class Desk:
    """A run, and the nodes that work for it.

    Args:
        tuning: The run, and what it needs.

    Attributes:
        run: As it is served; there once the ``async with`` block has begun.
    """

    run: ServedRun

    def __init__(self, tuning: Tuning) -> None:
        tuning.check()
        self._tuning = tuning
        self._token = secrets.token_urlsafe(32)
        self._aggregator = Aggregator(
            backend=tuning.backend, store=tuning.store, enrolment_tokens=[self._token]
        )
        self._service = self._aggregator.service
        self._stack = AsyncExitStack()
        self._nodes: dict[int, _Node] = {}
        self._by_index: dict[int, _Node] = {}
        self._gathered = 0.0

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._aggregator)
        try:
            spec = self._tuning.spec
            known = await self._service.known(spec.name)
            if known is not None and known.spec.is_same_run(spec) and known.broken_off:
                # Who starts it again wants it to go on.
                await self._service.resume_run(known)
            self.run = await self._aggregator.add_run(spec, self._tuning.vocabulary)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def measure(self) -> None:
        """Begins to measure prompts on the dev split: from here on the model is asked."""
        tuning = self._tuning
        await self._aggregator.add_run(
            tuning.spec,
            tuning.vocabulary,
            dev=tuning.dev,
            score=tuning.score,
            measure=tuning.measure,
        )

    async def wait(self) -> None:
        """Returns when the run's last prompt was measured."""
        await self._aggregator.wait(self.run)

    # Nodes

    async def admit(self, arrivals: Iterable[tuple[int, str, Item]]) -> dict[int, str]:
        """Enrols nodes that say that they can work, one after the other: draws go by that order.

        Args:
            arrivals: Flower's id of each, the name by which it is known again after a restart, and
                its call: a ``claim``, or an ``update`` that it has kept from before.

        Returns:
            Why nodes were not let in, by Flower's id.
        """
        refused = {}
        for node_id, name, call in arrivals:
            try:
                held = _held(call)
            except MessageError as exc:
                refused[node_id] = str(exc)
                continue
            # The same name is the same client: also of a node that SuperLink gave another id.
            nonce = hashlib.sha256(f"flower {name}".encode()).hexdigest()
            enrolled = await self._service.enrol(self._token, Enrol(name=name, nonce=nonce))
            client = await self._service.client(enrolled.credential)
            before = self._by_index.get(client.index)
            if before is not None:
                self._nodes.pop(before.node_id, None)
            node = _Node(node_id=node_id, client=client, held=held)
            self._nodes[node_id] = self._by_index[client.index] = node
            await self.take(node_id, call)
        await self._gather()
        return refused

    def knows(self, node_id: int) -> bool:
        """Whether a node has enrolled and can be given work."""
        return node_id in self._nodes

    @property
    def num_nodes(self) -> int:
        """How many have enrolled and can be given work."""
        return len(self._nodes)

    @property
    def num_needed(self) -> int:
        """How many there must be: all that the run wants before its first round, one later."""
        state = self.run.state
        return 1 if state.round or state.seats else self.run.machine.min_clients

    async def _gather(self) -> None:
        """Lets nodes wait for work; who is not heard of for long would be dropped."""
        self._gathered = asyncio.get_running_loop().time()
        nodes = sorted(self._nodes.values(), key=lambda node: node.client.index)
        await self._service.gather({node.client.index: node.held for node in nodes})

    async def lose(self, node_id: int, reason: str) -> None:
        """Gives a node's work to another one, and no more to it until it is admitted again.

        It may have spent all that it had leased: nobody knows.

        Args:
            node_id: Flower's.
            reason: What happened.
        """
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        del self._by_index[node.client.index]
        # First: else the seat could be offered to it again.
        self._service.dispatcher.left([node.client.index])
        await self._give_up(node, reason)

    async def _give_up(self, node: _Node, reason: str) -> None:
        errand, node.errand = node.errand, None
        if errand is not None:
            spent = Usage(queries=errand.work.leased_queries)
            message = Decline(reason=reason[:500], usage=spent)
            with suppress(ProblemError):  # it has ended already, or the run has
                await self._service.decline(node.client, errand.work.assignment_id, message)

    # Work

    async def letters(self, idle: Collection[int]) -> dict[int, list[Item]]:
        """What is to be sent, by node: its work, and the answers to the calls that it made.

        Args:
            idle: The nodes that have no message under way.
        """
        if asyncio.get_running_loop().time() > self._gathered + STAY_S / 3:
            await self._gather()
        letters: dict[int, list[Item]] = {}
        seats = [seat for seat in self.run.state.seats if seat.phase != "done"]
        open_work = {seat.assignment_id for seat in seats}
        for seat in seats:
            node = self._by_index.get(seat.client)
            if node is None or node.node_id not in idle or node.node_id in letters:
                continue  # Of its two seats, it has one after the other.
            errand = node.errand
            if errand is None or errand.work.assignment_id not in open_work:
                errand = node.errand = await self._assign(node)
            if errand is not None:
                letters[node.node_id] = [*node.settled.values(), *errand.answers]
        for letter in letters.values():
            for item in letter:
                self._count(item, to_node=True)
        return letters

    async def _assign(self, node: _Node) -> _Errand | None:
        run = self.run
        claim = Claim(num_examples=node.held, wait_s=0, run_id=run.run_id)
        try:
            work = await self._service.claim(node.client, claim)
        except ProblemError as exc:
            if exc.code != "run_ended":
                raise
            return None
        if isinstance(work, TurnedAway):
            return None
        answers = [item_of("claim", "", work), item_of("task", run.run_id, run.task)]
        if self._tuning.backend is None:  # A node with a model of its own would ask for it next.
            answers.append(item_of("vocabulary", run.run_id, self._vocabulary))
        return _Errand(work=work, answers=answers)

    @property
    def _vocabulary(self) -> VocabularyList:
        return self.run.vocabulary_list()

    async def take(self, node_id: int, call: Item) -> str | None:
        """Takes a node's call, and keeps the answer for the next letter to it.

        Args:
            node_id: Flower's.
            call: Also one that comes late, or twice.

        Returns:
            Why the node was lost by it; None where it was not.
        """
        node = self._nodes[node_id]
        self._count(call)
        errand, refused = node.errand, None
        if call.kind == "claim" and errand is None:
            return None  # It waits for work.
        if errand is not None and errand.has_answer(call):
            return None  # It came twice, and would be paid twice.
        try:
            answer = await self._answer(node, call)
        except ProblemError as exc:
            answer, refused = refusal(call, exc), exc
        except MessageError as exc:
            await self.lose(node_id, str(exc))
            return str(exc)
        if call.kind == "update":
            node.settled[call.subject] = answer
            while len(node.settled) > _MOST_SETTLED:
                del node.settled[next(iter(node.settled))]
        if errand is None:
            return None
        if call.kind not in ("update", "decline"):
            errand.answers.append(answer)
        elif call.subject == errand.work.assignment_id:
            if refused is None:
                node.errand = None
            else:  # It has lost its seat, or it does now.
                await self._give_up(node, f"its {call.kind} was refused: {refused.detail}")
        return None

    async def _answer(self, node: _Node, call: Item) -> Item:
        """Answers one call.

        Raises:
            MessageError: It cannot be read.
            ProblemError: It is refused.
        """
        service, run, client = self._service, self.run, node.client
        body_sha256 = hashlib.sha256(call.body.content).hexdigest()
        if call.kind == "score":
            score = parse(Score.model_validate_json, call)
            return item_of("score", call.subject, await service.score(client, score, body_sha256))
        if call.kind == "update":
            update = parse(UPDATE.validate_json, call)
            receipt = await service.update(client, call.subject, update, body_sha256)
            return item_of("update", call.subject, receipt)
        if call.kind == "decline":
            decline = parse(Decline.model_validate_json, call)
            if not call.subject:
                raise MessageError(decline.reason)
            _log.info("work given back", node=node.node_id, reason=decline.reason)
            await service.decline(client, call.subject, decline)
            return item_of("decline", call.subject, None)
        if call.kind == "claim":
            raise MessageError("it asks for work, and has got some")
        if call.subject != run.run_id:
            raise ProblemError("not_found", f"there is no run {call.subject!r}")
        known = run.task if call.kind == "task" else self._vocabulary
        return item_of(call.kind, run.run_id, known)

    def _count(self, item: Item, *, to_node: bool = False) -> None:
        size = len(item.body.content)
        up, down = (0, size) if to_node else (size, 0)
        self.run.count(up, down, gateway=item.kind == "score")


def _held(call: Item) -> int:
    """How many examples a node holds that was asked whether it can work.

    Raises:
        MessageError: It cannot.
    """
    if call.kind == "claim":
        return parse(Claim.model_validate_json, call).num_examples
    if call.kind == "update":
        return parse(UPDATE.validate_json, call).num_examples
    if call.kind == "decline":
        raise MessageError(parse(Decline.model_validate_json, call).reason)
    raise MessageError(f"it was asked whether it can work, and calls {call.kind}")
