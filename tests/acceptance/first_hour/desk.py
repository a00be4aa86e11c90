"""Files and servers of the four users."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from fedone_sdk import assets
from tests.acceptance.processes import Start
from tests.processes import Process, free_port

ENROLMENT, ADMIN = "enrolment-8c1f7a0b9d3e", "operator-5d2b9c7f1a6e"

_opener = build_opener(ProxyHandler({}))

_RUN = """\
name: {name}
task: {{template: "{{prompt}} {{text}} It was {{mask}}.", labels: {labels}}}
data: {data}
prompt: {{length: 2, vocabulary: {{kind: list, candidates: [" x", " y", " z"]}}}}
method: {{name: thompson, num_samples: 4, batch_size: 4}}
participation: {{exchange: losses, min_clients: 1}}
budget: {{queries: {queries}}}
rounds: 10000
evaluation: {{every: 0, examples: 8}}
"""
_SERVER = """\
listen: 127.0.0.1:{port}
store: fedone.db
auth: {{enrolment_tokens: [{{env: FEDONE_ENROLMENT}}], admin_token: {{env: FEDONE_ADMIN_TOKEN}}}}
backend: {backend}
runs: [{runs}]
"""
_MODEL = '''\
"""A model of this machine: it answers unless there is a file `down`."""

import asyncio
from pathlib import Path

from fedone_sdk.errors import BackendUnavailable
from fedone_sdk.testing import ScriptedBackend


class Model(ScriptedBackend):
    def __init__(self) -> None:
        super().__init__(gate=self._answers)

    async def _answers(self, query) -> None:
        await asyncio.sleep(0.02)
        if Path("down").exists():
            raise BackendUnavailable("the model server is down")
'''


def feedback(count: int) -> list[dict[str, Any]]:
    """Labelled sentences that come with the SDK; the labels are ``bad`` and ``good``."""
    lines = (assets.path("companion_feedback") / "train.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [{"text": row["text"], "label": ("bad", "good")[row["label"]]} for row in rows]


def tickets_csv(folder: Path, count: int = 120) -> None:
    """Writes ``tickets.csv``."""
    with (folder / "tickets.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["text", "label"])
        table.writeheader()
        table.writerows(feedback(count))


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes a JSON Lines file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_yaml(
    folder: Path, name: str, *, labels: str = '{bad: " bad", good: " good"}', queries: int = 40000
) -> None:
    """Writes ``NAME.yaml``; a file ``NAME.dev.jsonl`` next to it is measured on."""
    dev = f"{name}.dev.jsonl"
    data = f"{{dev: {dev}}}" if (folder / dev).exists() else "null"
    (folder / f"{name}.yaml").write_text(
        _RUN.format(name=name, labels=labels, data=data, queries=queries)
    )


def serve(folder: Path, start: Start, *runs: str) -> tuple[Process, str]:
    """Starts `fedone serve` with runs that are there; the process and its URL."""
    (folder / "model.py").write_text(_MODEL)
    retry = "{attempts: 2, max_wait_s: 2, breaker_failures: 2}"
    backend = f'{{kind: own, object: "model:Model", retry: {retry}}}'
    port = free_port()
    names = ", ".join(f"{run}.yaml" for run in runs)
    (folder / "server.yaml").write_text(_SERVER.format(port=port, backend=backend, runs=names))
    server = start("serve", "server.yaml")
    server.says('"event": "serving"')
    return server, f"http://127.0.0.1:{port}"


def get(url: str, accept: str = "*/*") -> tuple[int, str]:
    """The status and the text of what an operator is answered."""
    headers = {"Accept": accept, "Authorization": f"Bearer {ADMIN}"}
    try:
        with _opener.open(Request(url, headers=headers), timeout=10) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def plain(text: str) -> str:
    """What was printed, with one blank where columns are apart."""
    return re.sub(" +", " ", text)
