"""FedOne's edge client as a Flower ClientApp."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.client import EdgeClient, Hooks, Network, OnlyWhen
from fedone_sdk.client.batch import BeforeSend
from fedone_sdk.client.source import Data
from fedone_sdk.errors import FedOneError, one_line
from fedone_sdk.flower.data import node_file, partition_of
from fedone_sdk.flower.relay import Kept, Relay, kept_folder, turn
from fedone_sdk.flower.wire import RECORD, Item, item_of, pack, unpack
from fedone_sdk.messages import Decline
from fedone_sdk.task import ScoreFunction

_log = structlog.get_logger(__name__)

_SERVER = "flower"
"""The server's name in the client's state files."""


def client_app(
    data: Callable[[Context], Data] = node_file,
    *,
    backend: Callable[[Context], LLMBackend] | None = None,
    score: ScoreFunction | None = None,
    before_send: BeforeSend | None = None,
    only_when: OnlyWhen | None = None,
    state_dir: str | Path | None = None,
) -> ClientApp:
    """Return a ClientApp whose nodes are edge clients of a `FedOneStrategy`.

    Each message is one turn of an `EdgeClient`, up to the next call that the server must answer.
    The factory functions are called once per message, because Flower may run each message in a
    separate process.

    Args:
        data: Returns a node's examples; by default, from the file that its node config names.
        backend: Creates a model on the node, closed after the message; None scores through the
            server's.
        score: ``score(generated, example)`` from 0 to 1, for runs with loss ``score``.
        before_send: Gets every text before it is scored; see `fedone_sdk.client.Hooks`.
        only_when: Whether the node may work now; see `fedone_sdk.client.Hooks`.
        state_dir: Folder of the node's method memory, with a subfolder per ``partition-id`` if it
            has one. By default the memory is in Flower's context, which lives as long as the
            SuperNode.
    """
    app = ClientApp()

    @app.query()
    @app.train()
    def work(message: Message, context: Context) -> Message:
        partition: int | None = None
        try:
            partition = partition_of(context)
            reply = asyncio.run(_reply(message, context))
        except FedOneError as exc:
            _log.warning("this node cannot work", reason=str(exc))
            reply = _unable(str(exc))
        except Exception as exc:
            # Only the error's type leaves the node, because its text may quote private data.
            _log.error("this node cannot work", traceback=traceback.format_exc())
            reply = _unable(f"{type(exc).__name__} in the node's app; see its log")
        record = ConfigRecord(pack([reply]))
        if partition is not None:
            record["partition-id"] = partition
        return Message(RecordDict({RECORD: record}), reply_to=message)

    async def _reply(message: Message, context: Context) -> Item:
        answers = unpack(message.content.config_records.get(RECORD))
        if state_dir is not None:
            # Nodes of a simulation share a machine; a deployed node's id may change on restart.
            number = partition_of(context)
            own = "" if number is None else f"partition-{number}"
            return await _turn(answers, context, Path(state_dir) / own)
        kept = context.state.config_records.get(RECORD, ConfigRecord())
        before: Kept = {path: bytes(content) for path, content in kept.items()}
        with kept_folder(before) as (folder, after):
            reply = await _turn(answers, context, folder)
        context.state[RECORD] = ConfigRecord(after)
        return reply

    async def _turn(answers: list[Item], context: Context, folder: Path) -> Item:
        async with AsyncExitStack() as stack:
            model = None if backend is None else backend(context)
            if model is not None:
                await stack.enter_async_context(model)
            relay = Relay(f"node-{context.node_id}", answers)
            client = EdgeClient(
                _SERVER,
                token=_SERVER,
                data=data(context),
                backend=model,
                state_dir=folder,
                hooks=Hooks(
                    before_send=before_send,
                    only_when=only_when,
                    score=score,
                ),
                network=Network(transport=relay),
            )
            return await turn(client, relay)

    return app


def _unable(reason: str) -> Item:
    return item_of("decline", "", Decline(reason=one_line(reason)[:500]))
