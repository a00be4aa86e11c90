"""A hostile server, or its operators, against the rows of a device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedone_sdk.aggregator import Service
from fedone_sdk.client import RequiredPrivacy
from fedone_sdk.messages import RunTask
from fedone_sdk.task import Rendered, TaskSpec
from fedone_sdk.testing import ScriptedBackend, pseudo_log_probs
from tests.attacks import Succeeded, attack
from tests.runs import RecordingTransport, memory_client, run_spec, serving

LABELS = {"ill": " ill", "well": " well"}
ROWS = [
    {
        "text": f"visit {n}",
        "email": f"{n}@example.org",
        "region": ("north", "south")[n % 2],
        "label": ("ill", "well", "well")[n % 3],
    }
    for n in range(12)
]


class Hostile(RecordingTransport):
    """A server that describes another task than its run's."""

    def __init__(self, service: Service, **task: Any) -> None:
        super().__init__(service)
        self.task_keys = task

    async def task(self, credential: str, run_id: str) -> RunTask:
        document = (await super().task(credential, run_id)).model_dump(mode="json")
        task = TaskSpec.model_validate({**document["task"], **self.task_keys})
        return RunTask.model_validate({**document, "task": task, "task_crc32": task.crc32})

    @property
    def sent(self) -> str:
        """All that the device has sent in its work."""
        messages = (*self.claims, *self.scores, *self.updates, *self.declines)
        return "\n".join(message.model_dump_json() for message in messages)


async def ask(
    task: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]] = ROWS,
    *,
    folder: Path | None = None,
    **options: Any,
) -> Hostile:
    """Let a device meet a hostile task once; with a folder, it requires privacy."""
    private = folder is not None
    spec = run_spec(
        method={"batch_size": 12},
        **({"privacy": {"clip": 2.0, "noise_multiplier": 4.0}} if private else {}),
    )
    if private:
        required = RequiredPrivacy(max_epsilon=8.0)
        options = {
            **{"label": "label", "fields": ("text", "email"), "state_dir": folder},
            **{"backend": ScriptedBackend(_refusing), "require_privacy": required, **options},
        }
    async with serving(spec, backend=ScriptedBackend()) as service:
        transport = Hostile(service, **{"labels": LABELS, **task})
        async with memory_client(service, data=rows, transport=transport, **options) as client:
            await client.run_once()
    return transport


def _refusing(inputs: Rendered, words: Sequence[str]) -> tuple[float, ...] | None:
    """Answer, but for texts that name a rare disease."""
    return None if any("rare" in part.text for part in inputs) else pseudo_log_probs(inputs, words)


@attack("A server names labels that select rows", before="12 of 12 texts of one label")
async def _select_rows(_: Path) -> str:
    for label in ("ill", "well"):
        found = await ask({"labels": {label: " a", "zzz": " b"}})
        if found.scores:
            raise Succeeded(f"{len(found.scores[0].examples)} texts of {label!r}")
    return "declined, no text sent"


@attack(
    "A server takes other columns, as label, in templates or as references",
    before="labels and addresses verbatim",
)
async def _send_columns(_: Path) -> str:
    regions = {"labels": {"north": " a", "south": " b"}, "label_field": "region"}
    templates: list[dict[str, Any]] = [
        {"template": "{prompt} {label} {email} {mask}", **regions},
        {"template": "{prompt} {label} {mask}", **regions},
        {"template": "{prompt} {text} {email} {mask}"},
        {"template": None, "chat": {"system": "{email}", "user": "{prompt}{text}"}},
        {"template": "{prompt} {text}", "loss": "nll", "metric": "loss", "labels": {}},
        {"template": "{prompt} {region}", "loss": "nll", "metric": "loss", "labels": {}}
        | {"label_field": "email"},
        {"template": "{prompt} {label}", "loss": "score", "metric": "loss", "labels": {}}
        | {"label_field": "region"},
    ]
    for task in templates:
        sent = (await ask(task, fields=("text",), score=lambda _, __: 0.5)).sent
        if "@" in sent or "well" in sent or "north" in sent:
            raise Succeeded(f"columns by {task}")
    return f"{len(templates)} of {len(templates)} declined"


_TASKS: Mapping[str, Mapping[str, Any]] = {
    "its own labels": {},
    "labels that select": {"labels": {"ill": " ill", "zzz": " no"}},
    "another column": {"template": "{prompt} {email} {mask}"},
    "an optional column": {"template": "{prompt} {text} {note} {mask}"},
    "references": {"loss": "nll", "metric": "loss", "labels": {}, "template": "{prompt} {text}"},
    "scores": {"loss": "score", "metric": "loss", "labels": {}, "template": "{prompt} {text}"},
}

_WORKED = ("its own labels", "another column", "references", "scores")

_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "another label": {"label": "well"},
    "a text that the app holds back": {"text": "secret"},
    "a text that the model refuses": {"text": "rare"},
    "a long text": {"text": "long " * 3000},
    "another column": {"note": "n"},
}


@attack(
    "A server counts rows of a private device by tasks that fail on some",
    before="exact counts, at epsilon 0",
)
async def _count_rows(folder: Path) -> str:
    """Compare all that two devices send that differ in one row, but for noised losses.

    The row is one of many in its mini-batch, or the only one, as a server can choose it.
    """
    pairs = 0
    cases = [(ROWS, name) for name in _TASKS] + [(ROWS[:1], name) for name in _WORKED]
    for number, (rows, name) in enumerate(cases):
        task = _TASKS[name]
        plain = await _transcript(folder / f"{number}", task, rows)
        assert any("scored" in message for message in plain) == (name in _WORKED), (name, plain)
        for at, (what, change) in enumerate(_CHANGES.items()):
            changed = [{**rows[0], **change}, *rows[1:]]
            other = await _transcript(folder / f"{number}-{at}", task, changed)
            pairs += 1
            if other != plain:
                raise Succeeded(f"{what}, by {name}: {plain} and {other}")
    return f"{pairs} of {pairs} pairs of devices look alike"


async def _transcript(folder: Path, task: Mapping[str, Any], rows: Any) -> list[Any]:
    def before_send(text: str) -> str | None:
        return None if "secret" in text else text

    def score(written: str, row: Mapping[str, Any]) -> float:
        return {"ill": 0.5}[row["label"]]

    found = await ask(task, rows, folder=folder, before_send=before_send, score=score)
    lines = [json.loads(line) for line in found.sent.splitlines()]
    return [{key: line[key] for key in line.keys() - {"losses"}} for line in lines]


@attack(
    "A server guesses which labels occur on a private device that declares its labels",
    before="yes or no, at epsilon 0",
)
async def _guess_labels(folder: Path) -> str:
    rows = [{**row, "label": "well"} for row in ROWS]
    found = []
    for number, held in enumerate((rows, [{**rows[0], "label": "HIV-positive"}, *rows[1:]])):
        labels = ("well", "ill", "HIV-positive")
        transport = await ask({}, held, folder=folder / f"{number}", labels=labels)
        found.append([message.model_dump_json() for message in transport.declines])
    if found[0] != found[1]:
        raise Succeeded(f"{found[0]} without the label, {found[1]} with it")
    return "the same answer with and without it"
