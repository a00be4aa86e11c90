"""A device with growing data, redaction of texts, and a durable state folder.

FEDONE_TOKEN=... python examples/edge_client.py http://127.0.0.1:8080 rows.jsonl

Prints log lines; exits when all runs have ended, or after the current work at Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedone_sdk import EdgeClient, Hooks

STATE = Path("device-state")


def redact(text: str) -> str | None:
    """Redact a text before it leaves the device; None would withhold the example."""
    return re.sub(r"\S+@\S+", "[mail]", text)


def score(generated: str, example: Mapping[str, Any]) -> float:
    """Return the quality of a generated text, from 0 to 1, for runs with loss ``score``."""
    keywords = example["keywords"]
    return sum(word in generated for word in keywords) / len(keywords)


def examples(file: Path) -> list[dict[str, Any]]:
    """Return the current examples; called before each assignment."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


async def take_part(server: str, token: str, file: Path, state: Path = STATE) -> None:
    """Work until the aggregator's runs have ended, or until Ctrl-C."""
    async with EdgeClient(
        server,
        token=token,
        data=lambda: examples(file),
        state_dir=state,  # so that a restarted app is the same device
        hooks=Hooks(before_send=redact, score=score),
    ) as client:
        # `stop` lets the client finish its current work.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, client.stop)
        await client.run_forever()


def main() -> None:
    """Read the arguments, and run the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="base URL of the aggregator")
    parser.add_argument("file", type=Path, help="rows of this device, JSON lines")
    arguments = parser.parse_args()
    asyncio.run(take_part(arguments.server, os.environ["FEDONE_TOKEN"], arguments.file))


if __name__ == "__main__":
    main()
