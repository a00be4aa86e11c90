"""Prompts that are not tuned, through the same scoring as the others."""

from __future__ import annotations

from pathlib import Path

from fedone_paper import Settings, declared
from fedone_paper.glue import GLUE_TASKS, glue_task
from fedone_paper.methods import METHODS
from fedone_sdk.evaluation.engine import Result, Workspace

RUN = {
    "task": "sst2",
    "num_clients": 4,
    "shots": 4,
    "prompt_len": 3,
    "vocab_size": 20,
    "num_samples": 4,
    "batch_size": 4,
    "searches": False,
}
MANUAL_PROMPTS = declared()["manual_prompts"]


def run(glue: Path, seed: int, folder: Path) -> Result:
    run = {**RUN, "seed": seed}
    trial = METHODS["in-context"].trial("x", Settings(data=glue), run)
    return trial.run(trial.options, Workspace(inputs=trial.inputs, folder=folder))


def test_a_manual_prompt_names_every_label_word() -> None:
    assert set(MANUAL_PROMPTS) == set(GLUE_TASKS)
    for task, prompt in MANUAL_PROMPTS.items():
        words = {word.strip() for word in glue_task(task).label_words}
        assert words <= set(prompt.replace(",", "").replace(".", "").split())


def test_demonstrations_leave_room_for_the_inputs(glue: Path, tmp_path: Path) -> None:
    dev = glue / "sst2" / "dev.jsonl"
    long = '{"sentence": "' + "quite a long story about many things " * 40 + '", "label": 1}\n'
    dev.write_text(long * 10)
    found = run(glue, 0, tmp_path / "work")
    assert (found["demonstrations"], found["prompt"]) == (0, "")
