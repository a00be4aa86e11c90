"""Who a device is and what it has not handed in yet, kept in a folder across restarts."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path

from fedone_sdk.errors import DataError

__all__ = ["StateFolder", "Unsent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """Finished work on its way to the server.

    Attributes:
        run_id: Of which run.
        assignment_id: Which work.
        update: The message, JSON.
        memory: What the method remembers once the update is accepted; empty for nothing.
    """

    run_id: str
    assignment_id: str
    update: str
    memory: bytes = b""


class StateFolder:
    """A device's small state: its identity, what its method remembers, and work not handed in.

    Args:
        path: The folder; created readable by its owner only.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def credential(self, server: str) -> str | None:
        """The credential for a server, or None."""
        try:
            identities = json.loads((self._path / "identity.json").read_text(encoding="utf-8"))
            known = identities.get(server)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError) as exc:
            raise DataError(f"{self._path / 'identity.json'}: cannot be used: {exc}") from exc
        return known if isinstance(known, str) else None

    def keep_credential(self, server: str, credential: str | None) -> None:
        """Remembers the credential for a server; None forgets it."""
        file = self._path / "identity.json"
        identities = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        identities[server] = credential
        self._write("identity.json", json.dumps(identities).encode())

    def memory(self, run_id: str) -> bytes | None:
        """What the method remembers of a run."""
        file = self._path / f"{run_id}.memory"
        return file.read_bytes() if file.exists() else None

    def keep_memory(self, run_id: str, memory: bytes) -> None:
        """Remembers what the method knows after an accepted update."""
        self._write(f"{run_id}.memory", memory)

    def unsent(self) -> Unsent | None:
        """Finished work of which nobody knows whether the server has it."""
        try:
            found = json.loads((self._path / "unsent.json").read_text(encoding="utf-8"))
            return Unsent(**{**found, "memory": base64.b64decode(found["memory"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as exc:
            raise DataError(f"{self._path / 'unsent.json'}: cannot be used: {exc}") from exc

    def keep_unsent(self, unsent: Unsent | None) -> None:
        """Keeps finished work until the server has taken or refused it; None forgets it."""
        if unsent is None:
            (self._path / "unsent.json").unlink(missing_ok=True)
            return
        memory = base64.b64encode(unsent.memory).decode("ascii")
        document = {
            "run_id": unsent.run_id,
            "assignment_id": unsent.assignment_id,
            "update": unsent.update,
            "memory": memory,
        }
        self._write("unsent.json", json.dumps(document).encode())

    def _write(self, name: str, content: bytes) -> None:
        # Whole or not at all, and never readable by others, not even for a moment.
        draft = self._path / f".{name}.new"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path / name)
