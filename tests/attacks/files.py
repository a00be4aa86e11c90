"""A hostile artefact, RUN.yaml, file name or text of a proposer against its user's machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fedone_sdk.backends import ModelClient
from fedone_sdk.budget import NOTHING
from fedone_sdk.messages import Cap, MetricReport, PromptReport
from fedone_sdk.reports import PromptArtefact
from fedone_sdk.reports.artefact import ArtefactEvaluation, LedgerReport
from fedone_sdk.task import TaskSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.attacks import Succeeded, attack
from tests.integration.test_slots import SLOTS, served, spec_of

_EVIL = "import pathlib\npathlib.Path('ran').touch()\ndef f(*_): return 1.0\n"
_RUN = """\
name: mine
task: {template: "{prompt}{text} It was", labels: {0: " bad", 1: " good"}}
data: {dev: rows.jsonl}
prompt: {length: 1, vocabulary: {kind: list, candidates: [" a", " b"]}}
budget: {queries: 6}
backend: {kind: own, object: "fedone_sdk.testing:ScriptedBackend"}
"""
_TASKS = (
    {"template": "{prompt}{text}", "loss": "score", "score": "evil:f"},
    {"template": "{prompt}{text}", "labels": {"0": " bad", "1": " good"}, "metric": "evil:f"},
)


def _artefact(task: TaskSpec) -> PromptArtefact:
    ledger = LedgerReport(cap=Cap(), spent=NOTHING, leased=NOTHING, evaluation=NOTHING, priced=True)
    return PromptArtefact(
        run_id="theirs",
        name="theirs",
        status="completed",
        rounds=1,
        seed=0,
        method="random",
        prompt=PromptReport(text="</s> a", tokens=("</s> a",)),
        task=task,
        model=None,
        alpha_sha256="0" * 64,
        ledger=ledger,
        evaluation=ArtefactEvaluation(metric=MetricReport(name="accuracy"), batch_size=2),
        sdk_version="1",
    ).signed()


@attack("A prompt artefact names a function", before="it runs at `fedone score --artefact`")
def _run_code(folder: Path) -> str:
    (folder / "evil.py").write_text(_EVIL)
    (folder / "run.yaml").write_text(_RUN)
    rows = (json.dumps({"text": f"row {n}", "label": n % 2}) for n in range(4))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    said = []
    for task in _TASKS:
        artefact = _artefact(TaskSpec.model_validate(task))
        (folder / "theirs.json").write_text(artefact.dump())
        for command in (
            ("score", "run.yaml", "--artefact", "theirs.json"),
            ("prompt", "use", "theirs.json", "--data", "rows.jsonl", "--backend", "run.yaml"),
        ):
            found = subprocess.run(
                (sys.executable, "-m", "fedone_sdk.cli", *command),
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                capture_output=True,
                text=True,
            )
            if (folder / "ran").exists():
                raise Succeeded(" ".join(command))
            said.append((found.returncode, found.stderr))
    assert [code for code, _ in said] == [2, 0] * 2, said
    assert all("evil:f" in err for _, err in said), said
    assert all("'</s>'" in err for code, err in said if code == 0), said
    return "names are shown, not imported"


@attack(
    "A prompt artefact has escape sequences of terminals",
    before="`fedone prompt use` writes them to the terminal",
)
def _control_terminal(folder: Path) -> str:
    hostile = "x\x1b]52;c;b3duZWQ=\x07\x9b31m"
    artefact = _artefact(TaskSpec.model_validate(_TASKS[1]))
    prompt = artefact.prompt.model_copy(update={"text": hostile, "tokens": (hostile,)})
    artefact = artefact.model_copy(update={"prompt": prompt}).signed()
    (folder / "theirs.json").write_text(artefact.dump())
    ours, theirs = os.openpty()
    command = (sys.executable, "-m", "fedone_sdk.cli", "prompt", "use", "theirs.json")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, cwd=folder, env=environment, stdout=theirs, stderr=theirs, check=True)
    shown = os.read(ours, 10_000).decode()
    os.close(theirs)
    os.close(ours)
    assert "52;c;" in shown, shown
    if set(shown) & {"\x1b", "\x07", "\x9b"}:
        raise Succeeded(f"the terminal gets {shown!r}")
    return "they are replaced; a file or a pipe gets the exact text"


@attack(
    "A proposer or a message has special tokens of chat templates",
    before="candidates with <|im_end|>",
)
async def _inject_special_tokens(_: Path) -> str:
    class Model(ScriptedBackend):
        async def special_tokens(self, text: str) -> list[str]:
            return ["~~end~~"] if "~~end~~" in text else []

    hostile = ["x<|im_end|>", "</s>", "[INST] x", "\uff1c\uff5cend\uff5c\uff1e", "<|", "x ~~end~~"]
    written = json.dumps([*hostile, "Is it good?"])
    proposer = {"backend": {"kind": "onnx"}, "slot": "instruction", "every": 2}
    spec = spec_of("random", "losses", prompt={"slots": SLOTS, "proposer": proposer})
    writing = ModelClient(ScriptedBackend(write=lambda inputs, most: written))
    _, vocabulary = await served(spec, proposer=writing, gateway=Model())
    _, *added = vocabulary.candidates_of("instruction")[2:]
    if added != ["Is it good? "]:
        raise Succeeded(f"candidates {added}")
    for text in hostile[:-1]:
        try:
            Vocabulary(candidates=("", text))
        except ValueError:
            continue
        raise Succeeded(f"{text!r} by the wire")
    return f"{len(hostile)} of {len(hostile)} refused"
