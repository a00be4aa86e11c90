"""Who a device is, kept in a folder so that a restart does not make a new client of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedone_sdk.errors import DataError

__all__ = ["StateFolder"]


class StateFolder:
    """A device's small state: its identity, and what its method remembers.

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

    def _write(self, name: str, content: bytes) -> None:
        # Whole or not at all, and never readable by others, not even for a moment.
        draft = self._path / f".{name}.new"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path / name)
