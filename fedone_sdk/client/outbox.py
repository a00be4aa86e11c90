"""Finished work that the server has not got yet: it was paid for."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import structlog

from fedone_sdk.client.shelf import StateDir
from fedone_sdk.messages import UPDATE, AlphaUpdate, LossesUpdate

__all__ = ["Outbox", "Unsent"]

_log = structlog.get_logger(__name__)

_MOST = 16
"""Updates that wait at the same time; each is for an assignment with a deadline, so that an old
one is worth less than a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """Finished work on its way to the server.

    Attributes:
        run_id: Of which run.
        assignment_id: Which work.
        round: Its round.
        update: The message.
        memory: What the method remembers once the update is accepted; empty for nothing.
    """

    run_id: str
    assignment_id: str
    round: int
    update: AlphaUpdate | LossesUpdate
    memory: bytes = b""


class Outbox:
    """The updates that wait, the oldest first.

    Args:
        shelf: Keeps them.
    """

    def __init__(self, shelf: StateDir) -> None:
        self._shelf = shelf

    def put(self, unsent: Unsent) -> bool:
        """Keeps finished work until it is dropped; beyond a bound the oldest makes room.

        Returns:
            Whether it is kept as it should be; False where the disk did not take it.
        """
        document = {
            "run_id": unsent.run_id,
            "assignment_id": unsent.assignment_id,
            "round": unsent.round,
            "update": unsent.update.model_dump_json(),
            "memory": base64.b64encode(unsent.memory).decode("ascii"),
        }
        kept = self._shelf.write(_name(unsent.assignment_id), json.dumps(document).encode())
        for name in self._shelf.keep_newest("unsent-*.json", _MOST):
            _log.warning("finished work given up: too much waits", file=name)
        return kept

    def drop(self, assignment_id: str) -> None:
        """Forgets work that the server has taken or refused."""
        self._shelf.remove(_name(assignment_id))

    def waiting(self) -> list[Unsent]:
        """What waits; a damaged file is given up."""
        found = []
        for name in self._shelf.names("unsent-*.json"):
            content = self._shelf.read(name)
            try:
                document = json.loads(content or b"")
                found.append(
                    Unsent(
                        run_id=str(document["run_id"]),
                        assignment_id=str(document["assignment_id"]),
                        round=int(document["round"]),
                        update=UPDATE.validate_json(document["update"]),
                        memory=base64.b64decode(document["memory"], validate=True),
                    )
                )
            except (ValueError, TypeError, KeyError, RecursionError) as exc:
                _log.warning("damaged state file dropped", file=name, error=type(exc).__name__)
                self._shelf.remove(name)
        return found


def _name(assignment_id: str) -> str:
    return f"unsent-{assignment_id}.json"
