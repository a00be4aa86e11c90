"""Updates that the server has not accepted yet."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import structlog

from fedone_sdk.client.state_dir import StateDir
from fedone_sdk.messages import UPDATE, AlphaUpdate, LossesUpdate

_log = structlog.get_logger(__name__)

_MOST = 16
"""Updates that are kept; beyond it the oldest is dropped, whose deadline is the nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """An update that the server has not accepted yet.

    Attributes:
        run_id: The run.
        assignment_id: The work.
        round: Its round.
        update: The message.
        memory: The method's memory once the update is accepted; empty for none.
    """

    run_id: str
    assignment_id: str
    round: int
    update: AlphaUpdate | LossesUpdate
    memory: bytes = b""


class Outbox:
    """Unsent updates, the oldest first.

    Args:
        state: Keeps them.
    """

    def __init__(self, state: StateDir) -> None:
        self._state = state

    def put(self, unsent: Unsent) -> bool:
        """Store an update until it is dropped; beyond a bound the oldest one is deleted.

        Returns:
            Whether it is stored; False if the disk failed and it is in memory only.
        """
        document = {
            "run_id": unsent.run_id,
            "assignment_id": unsent.assignment_id,
            "round": unsent.round,
            "update": unsent.update.model_dump_json(),
            "memory": base64.b64encode(unsent.memory).decode("ascii"),
        }
        stored = self._state.write(_name(unsent.assignment_id), json.dumps(document).encode())
        for name in self._state.keep_newest("unsent-*.json", _MOST):
            _log.warning("unsent update deleted: too many are waiting", file=name)
        return stored

    def drop(self, assignment_id: str) -> None:
        """Delete an update that the server has accepted or refused."""
        self._state.remove(_name(assignment_id))

    def waiting(self) -> list[Unsent]:
        """Return the unsent updates; damaged files are deleted."""
        found = []
        for name in self._state.names("unsent-*.json"):
            content = self._state.read(name)
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
                _log.warning("damaged state file deleted", file=name, error=type(exc).__name__)
                self._state.remove(name)
        return found


def _name(assignment_id: str) -> str:
    return f"unsent-{assignment_id}.json"
