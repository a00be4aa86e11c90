"""The server side: the aggregator's service, which answers the calls of Flower's nodes."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

import structlog

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.aggregator.serving.client_pool import MEMBER_TTL_S, RetryLater
from fedone_sdk.backends import LLMBackend
from fedone_sdk.budget import Usage
from fedone_sdk.errors import MessageError, ProblemError, SpecError
from fedone_sdk.flower.wire import PROBLEM, Item, item_of, parse, refusal
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

_log = structlog.get_logger(__name__)

_MOST_SETTLED = 16
"""Receipts kept until a node's next assignment; a client keeps as many updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """A run and its dependencies.

    Attributes:
        spec: The run.
        vocabulary: Its candidates.
        backend: The server's model; None if nodes have their own models.
        dev: Held-out examples.
        score: The user's function, for loss ``score``.
        measure: The user's function, for a custom metric.
        store: The store of the run; None for memory.

    Raises:
        SpecError: Something that the run needs is missing.
    """

    spec: RunSpec
    vocabulary: Vocabulary
    backend: LLMBackend | None = None
    dev: Sequence[Example] = ()
    score: ScoreFunction | None = None
    measure: MetricFunction | None = None
    store: Store | None = None

    def __post_init__(self) -> None:
        task = self.spec.task
        if self.dev and self.backend is None:
            raise SpecError("dev: is measured by the server's model, so it needs a backend here")
        if self.dev and task.loss == "score" and self.score is None:
            raise SpecError("task.score: loss score needs a score function")
        if self.dev and ":" in task.metric and self.measure is None:
            raise SpecError(f"task.metric: {task.metric} needs the function measure")


@dataclass(slots=True, kw_only=True)
class _Assigned:
    """A node's current work."""

    work: AlphaAssignment | LossesAssignment
    answers: list[Item]

    def has_answer(self, call: Item) -> bool:
        """Return whether a call has an answer other than a refusal, which may be temporary."""
        return any(
            answer.kind == call.kind == "score"
            and answer.subject == call.subject
            and answer.body.content_type != PROBLEM
            for answer in self.answers
        )


@dataclass(slots=True, kw_only=True)
class _Node:
    """An enrolled node.

    Attributes:
        node_id: Flower's.
        client: The aggregator's.
        held: Number of its examples.
        assigned: Its current work.
        settled: Receipts of earlier updates, which are sent with its next work.
    """

    node_id: int
    client: ClientRecord
    held: int
    assigned: _Assigned | None = None
    settled: dict[str, Item] = field(default_factory=dict)


class NodeServer:
    """A run and its nodes.

    Attributes:
        run: The served run; set inside the ``async with`` block.
    """

    run: ServedRun

    def __init__(self, tuning: Tuning) -> None:
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
            known = await self._service.registry.get_or_load(spec.name)
            if known is not None and known.spec.is_same_run(spec) and known.was_stopped:
                # A restart resumes the run.
                await self._service.steering.resume(known)
            self.run = await self._aggregator.add_run(spec, self._tuning.vocabulary)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def measure(self) -> None:
        """Start evaluation on the dev split, which queries the model from here on."""
        tuning = self._tuning
        await self._aggregator.add_run(
            tuning.spec,
            tuning.vocabulary,
            dev=tuning.dev,
            score=tuning.score,
            measure=tuning.measure,
        )

    async def wait(self) -> None:
        """Wait until the run's last evaluation has ended."""
        await self.run.wait()

    # Nodes

    async def admit(self, arrivals: Iterable[tuple[int, str, Item]]) -> dict[int, str]:
        """Enrol nodes that are ready, in sequence, because draws depend on that order.

        Args:
            arrivals: Flower's id of each, its stable name across restarts, and its call: a
                ``claim``, or an ``update`` from before the restart.

        Returns:
            Why nodes were not admitted, by Flower's id.
        """
        refused = {}
        for node_id, name, call in arrivals:
            try:
                held = _held(call)
            except MessageError as exc:
                refused[node_id] = str(exc)
                continue
            # An equal name is the same client, even if SuperLink gave the node another id.
            nonce = hashlib.sha256(f"flower {name}".encode()).hexdigest()
            enrolled = await self._service.enrol(self._token, Enrol(name=name, nonce=nonce))
            client = await self._service.client(enrolled.credential)
            before = self._by_index.get(client.index)
            if before is not None:
                self._nodes.pop(before.node_id, None)
            node = _Node(node_id=node_id, client=client, held=held)
            self._nodes[node_id] = self._by_index[client.index] = node
            await self.receive(node_id, call)
        await self._gather()
        return refused

    def is_enrolled(self, node_id: int) -> bool:
        """Return whether a node is enrolled and available."""
        return node_id in self._nodes

    @property
    def num_nodes(self) -> int:
        """Number of enrolled and available nodes."""
        return len(self._nodes)

    @property
    def num_needed(self) -> int:
        """Required number of nodes: `min_clients` before the first round, then one."""
        state = self.run.state
        return 1 if state.round or state.seats else self.run.machine.min_clients

    async def _gather(self) -> None:
        """Renew the nodes' place in the pool, which expires without a request."""
        self._gathered = asyncio.get_running_loop().time()
        nodes = sorted(self._nodes.values(), key=lambda node: node.client.index)
        await self._service.enter_all({node.client.index: node.held for node in nodes})

    async def drop(self, node_id: int, reason: str) -> None:
        """Give up a node's work, and assign it none until it is admitted again.

        The whole lease counts as spent, because the node's actual usage is unknown.
        """
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        del self._by_index[node.client.index]
        # First, or else the seat could be offered to this node again.
        self._service.dispatcher.on_members_left([node.client.index])
        await self._give_up(node, reason)

    async def _give_up(self, node: _Node, reason: str) -> None:
        assigned, node.assigned = node.assigned, None
        if assigned is not None:
            spent = Usage(queries=assigned.work.leased_queries)
            message = Decline(reason=reason[:500], usage=spent)
            with suppress(ProblemError):  # the assignment or the run has already ended
                await self._service.decline(node.client, assigned.work.assignment_id, message)

    # Work

    async def outgoing(self, idle: Collection[int]) -> dict[int, list[Item]]:
        """Return what to send, by node: its work, and the answers to its calls.

        Args:
            idle: The nodes without a message in flight.
        """
        if asyncio.get_running_loop().time() > self._gathered + MEMBER_TTL_S / 3:
            await self._gather()
        outgoing: dict[int, list[Item]] = {}
        seats = [seat for seat in self.run.state.seats if seat.phase != "done"]
        open_work = {seat.assignment_id for seat in seats}
        for seat in seats:
            node = self._by_index.get(seat.client)
            if node is None or node.node_id not in idle or node.node_id in outgoing:
                continue  # A node with two seats works on one at a time.
            assigned = node.assigned
            if assigned is None or assigned.work.assignment_id not in open_work:
                assigned = node.assigned = await self._assign(node)
            if assigned is not None:
                outgoing[node.node_id] = [*node.settled.values(), *assigned.answers]
        for items in outgoing.values():
            for item in items:
                self._count(item, to_node=True)
        return outgoing

    async def _assign(self, node: _Node) -> _Assigned | None:
        run = self.run
        claim = Claim(num_examples=node.held, wait_s=0, run_id=run.run_id)
        try:
            work = await self._service.claim(node.client, claim)
        except ProblemError as exc:
            if exc.code != "run_ended":
                raise
            return None
        if isinstance(work, RetryLater):
            return None
        answers = [item_of("claim", "", work), item_of("task", run.run_id, run.task)]
        if self._tuning.backend is None:  # A node with its own model would request this next.
            answers.append(item_of("vocabulary", run.run_id, self._vocabulary))
        return _Assigned(work=work, answers=answers)

    @property
    def _vocabulary(self) -> VocabularyList:
        return self.run.vocabulary_list()

    async def receive(self, node_id: int, call: Item) -> str | None:
        """Process a node's call, and keep the answer for its next message.

        Args:
            node_id: Flower's.
            call: The call; it may be late or repeated.

        Returns:
            Why the node was lost; None if it was not.
        """
        node = self._nodes[node_id]
        self._count(call)
        assigned, refused = node.assigned, None
        if call.kind == "claim" and assigned is None:
            return None  # It waits for work.
        if assigned is not None and assigned.has_answer(call):
            return None  # A repeated call would be charged twice.
        try:
            answer = await self._answer(node, call)
        except ProblemError as exc:
            answer, refused = refusal(call, exc), exc
        except MessageError as exc:
            await self.drop(node_id, str(exc))
            return str(exc)
        if call.kind == "update":
            node.settled[call.subject] = answer
            while len(node.settled) > _MOST_SETTLED:
                del node.settled[next(iter(node.settled))]
        if assigned is None:
            return None
        if call.kind not in ("update", "decline"):
            assigned.answers.append(answer)
        elif call.subject == assigned.work.assignment_id:
            if refused is None:
                node.assigned = None
            else:  # It has lost its seat, or loses it now.
                await self._give_up(node, f"its {call.kind} was refused: {refused.detail}")
        return None

    async def _answer(self, node: _Node, call: Item) -> Item:
        """Answer one call.

        Raises:
            MessageError: It is malformed.
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
            raise MessageError("the node claims work, but has an assignment")
        if call.subject != run.run_id:
            raise ProblemError("not_found", f"there is no run {call.subject!r}")
        known = run.task if call.kind == "task" else self._vocabulary
        return item_of(call.kind, run.run_id, known)

    def _count(self, item: Item, *, to_node: bool = False) -> None:
        size = len(item.body.content)
        up, down = (0, size) if to_node else (size, 0)
        self.run.count_traffic(up, down, gateway=item.kind == "score")


def _held(call: Item) -> int:
    """Return the number of examples that a node reports when it is ready.

    Raises:
        MessageError: The node is not ready.
    """
    if call.kind == "claim":
        return parse(Claim.model_validate_json, call).num_examples
    if call.kind == "update":
        return parse(UPDATE.validate_json, call).num_examples
    if call.kind == "decline":
        raise MessageError(parse(Decline.model_validate_json, call).reason)
    raise MessageError(f"a node that was asked for readiness replied with the call {call.kind}")
