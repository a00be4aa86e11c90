"""The nodes of a Flower federation, as a strategy uses them: readiness, messages, replies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable
from logging import INFO, WARNING
from typing import Any, Self, TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedone_sdk.errors import MessageError, ProblemError, SpecError, one_line
from fedone_sdk.flower.node_server import NodeServer
from fedone_sdk.flower.wire import RECORD, Item, pack, unpack

T = TypeVar("T")

SHORTEST_S, LONGEST_S = 0.02, 0.5
"""Interval of polling for replies, seconds."""

_LOOK_S = 2.0
"""Interval of polling for new nodes, seconds."""

_READY_TIMEOUT_S = 60.0
"""Longest wait for the last nodes' readiness, seconds."""

_AGAIN_S = 60.0
"""Delay before a node that could not work is asked again, seconds."""


class Background:
    """An event loop in its own thread, because Flower calls strategies synchronously.

    The loop also runs between two calls: deadlines expire and evaluations finish while the caller
    waits for nodes.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._work, name="fedone strategy", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result.

        Raises:
            Exception: The coroutine's exception.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _work(self) -> None:
        asyncio.run(self._until_over())

    async def _until_over(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._over.wait()


class Nodes:
    """The nodes of a run that is served.

    Args:
        grid: Flower's.
        server: The run.
        background: The loop of the run.
        timeout_s: Longest wait for the number of nodes that the run needs, seconds.
    """

    def __init__(
        self, grid: Grid, server: NodeServer, background: Background, timeout_s: float
    ) -> None:
        self.server, self.run = server, background.run
        self._grid, self._timeout_s = grid, timeout_s
        # Message id -> the node that must reply.
        self._open: dict[str, int] = {}
        # Node id -> the node's name in the run.
        self._names: dict[int, str] = {}
        # Node id -> why it cannot work, and when to ask again.
        self._unable: dict[int, tuple[str, float]] = {}
        # The nodes connected according to SuperLink, and the time of that query.
        self._online: set[int] = set()
        self._looked = 0.0

    @property
    def idle(self) -> set[int]:
        """The nodes that can work and have no message in flight."""
        return (self._names.keys() & self._online) - set(self._open.values())

    @property
    def waiting(self) -> bool:
        """Whether a reply is due."""
        return bool(self._open)

    def too_few(self) -> SpecError:
        """Return the error of a run with too few working nodes."""
        unable = [f"node {node}: {reason}" for node, (reason, _) in self._unable.items()]
        more = f", and {len(unable) - 3} more" if len(unable) > 3 else ""
        needed = self.server.num_needed
        why = f" ({'; '.join(unable[:3])}{more})" if unable else ""
        return SpecError(f"the run needs {needed} nodes, and {self.server.num_nodes} can work{why}")

    # Messages

    def send(self, message: Message) -> bool:
        """Send a message; return whether SuperLink took it."""
        node_id = message.metadata.dst_node_id
        # One at a time: for a batch, SuperLink does not report which message it refused.
        for message_id in self._grid.push_messages([message]):
            if message_id is not None:
                self._open[message_id] = node_id
                return True
        log(WARNING, "SuperLink did not take a message for node %d", node_id)
        return False

    def receive(self) -> list[Message]:
        """Return the replies that have come."""
        return list(self._grid.pull_messages(list(self._open))) if self._open else []

    def process(self, reply: Message) -> None:
        """Process one reply."""
        node_id = self._node_of(reply)
        if not self.server.is_enrolled(node_id):
            self._admit([(node_id, reply)])
            return
        try:
            call = _call(reply)
        except (MessageError, ProblemError) as exc:
            reason: str | None = str(exc)
            self.run(self.server.drop(node_id, str(exc)))
        else:
            reason = self.run(self.server.receive(node_id, call))
        if reason is not None:
            self._reject(node_id, reason)

    def _node_of(self, reply: Message) -> int:
        """Return the node of a reply; SuperLink is the sender of a missing one."""
        sender = int(reply.metadata.src_node_id)
        return self._open.pop(reply.metadata.reply_to_message_id, sender)

    # Readiness

    def wait(self) -> None:
        """Admit the nodes that the first round needs, in the order of their partitions.

        Raises:
            SpecError: Too few nodes can work.
        """
        server, needed = self.server, self.server.num_needed
        until = time.monotonic() + self._timeout_s
        logged = -1
        while server.num_nodes < needed and not server.run.ended.is_set():
            connected = len(set(self._grid.get_node_ids()))
            if connected >= needed:
                self.poll(at_once=True)
                self._admit_first(until)
                if server.num_nodes >= needed:
                    break
                if len(self._unable) >= connected:
                    raise self.too_few()
            elif connected != logged:
                logged = connected
                log(INFO, "Waiting for nodes: %d of %d are connected", connected, needed)
            if time.monotonic() > until:
                raise self.too_few()
            time.sleep(LONGEST_S)
        log(INFO, "%d nodes can work", server.num_nodes)

    def poll(self, *, at_once: bool = False) -> None:
        """Ask new nodes whether they can work."""
        now = time.monotonic()
        if not at_once and now < self._looked + _LOOK_S:
            return
        self._looked = now
        asked = set(self._open.values())
        self._online = set(self._grid.get_node_ids())
        for node_id in self._online:
            _, again = self._unable.get(node_id, ("", 0.0))
            if not self.server.is_enrolled(node_id) and node_id not in asked and now >= again:
                self.send(message_of(node_id, "query", [], self._timeout_s))

    def _admit_first(self, until: float) -> None:
        """Wait for the readiness of all nodes that were asked, before the first is admitted."""
        arrivals: list[tuple[int, Message]] = []
        last_reply = time.monotonic()
        while self._open:
            replies, now = self.receive(), time.monotonic()
            arrivals += [(self._node_of(reply), reply) for reply in replies]
            timed_out = (
                len(arrivals) >= self.server.num_needed and now > last_reply + _READY_TIMEOUT_S
            )
            if replies:
                last_reply = now
            elif timed_out or now > until:
                break  # Nodes without a reply are admitted later.
            else:
                time.sleep(SHORTEST_S)
        self._admit(arrivals)

    def _admit(self, replies: Iterable[tuple[int, Message]]) -> None:
        """Admit nodes, in the order of their partitions, or else of their ids."""
        coming: dict[str, tuple[int, int, Item]] = {}
        for node_id, reply in sorted(replies, key=lambda arrival: arrival[0]):
            try:
                call = _call(reply)
            except (MessageError, ProblemError) as exc:
                self._reject(node_id, str(exc))
                continue
            partition = reply.content.config_records[RECORD].get("partition-id")
            name, place = f"node-{node_id}", node_id
            if isinstance(partition, int):
                name, place = f"partition-{partition}", partition
            named = (held for held, known in self._names.items() if known == name)
            holder = next(named, coming[name][1] if name in coming else node_id)
            if holder != node_id and holder in self._online:
                reason = f"its partition-id, {partition}, is node {holder}'s already"
                self._reject(node_id, reason)
                continue
            self._names.pop(holder, None)  # The holder is gone; this node replaces it.
            coming[name] = (place, node_id, call)
        ordered = sorted((place, node, name) for name, (place, node, _) in coming.items())
        arrivals = [(node, name, coming[name][2]) for _, node, name in ordered]
        refused = self.run(self.server.admit(arrivals))
        for node_id, name, _ in arrivals:
            if node_id in refused:
                self._reject(node_id, refused[node_id])
            else:
                self._unable.pop(node_id, None)
                self._names[node_id] = name

    def _reject(self, node_id: int, reason: str) -> None:
        reason = one_line(reason)[:500]
        log(WARNING, "Node %d cannot work: %s", node_id, reason)
        self._unable[node_id] = (reason, time.monotonic() + _AGAIN_S)
        self._names.pop(node_id, None)


def message_of(node_id: int, kind: str, items: list[Item], ttl_s: float) -> Message:
    """Return a message to a node."""
    content = RecordDict({RECORD: ConfigRecord(pack(items))})
    return Message(content, dst_node_id=node_id, message_type=kind, ttl=ttl_s)


def _call(reply: Message) -> Item:
    """Return the call in a node's reply.

    Raises:
        MessageError: Flower has no reply from it, or the reply is not from `client_app`.
        ProblemError: It has another protocol version.
    """
    if reply.has_error():
        raise MessageError(f"no reply; Flower reports: {reply.error.reason}")
    calls = unpack(reply.content.config_records.get(RECORD))
    if len(calls) != 1:
        raise MessageError(f"{RECORD}: a reply holds one call, not {len(calls)}")
    return calls[0]
