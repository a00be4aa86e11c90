"""Cost of Byzantine clients, with and without defences: accuracy of the deployable prompt.

Real protocol, real model, real sentences: the quickstart's federation (40 clients of 16 sentences,
416 dev sentences). Prompts are 2 tokens out of 30, so the model's answers to all 900 prompts fit a
file, which is computed once (12 minutes on one core). An attacker is an honest client whose updates
are changed in transit. Runs are paired by seed: the seed determines clients, prompts, mini-batches
and attackers.

    python tests/benchmarks/liars.py --table FILE [--model FOLDER] [--exchange losses]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from fedone_sdk import OnnxBackend, RunSpec, assets
from fedone_sdk.algorithms import Space, method_from_spec
from fedone_sdk.backends import Answer, LLMBackend, Query
from fedone_sdk.backends.queries import query_for
from fedone_sdk.budget import Usage
from fedone_sdk.client import Transport
from fedone_sdk.local import Federation, simulate
from fedone_sdk.messages import AlphaUpdate, LossesUpdate
from fedone_sdk.messages.tensor import from_wire, to_wire

CLIENTS, LENGTH, WORDS, ROUNDS = 40, 2, 30, 150
STANDARD, OFF = "standard", "none"

Losses = NDArray[np.float64]
Alpha = NDArray[np.float64]

METHOD: dict[str, Any] = {
    "name": "gs-bdpl",
    "tau": 1.0,
    "optimizer": "sgd",
    "learning_rate": 3e-3,
    "alpha_min": 1e-3,
    "batch_size": 16,
}


# The model: all of its answers, computed once


class TableBackend(LLMBackend):
    """Looks answers up in the file."""

    def __init__(self, file: Path) -> None:
        with np.load(file) as loaded:
            self.log_probs = loaded["log_probs"]
            self.rows = {text: row for row, text in enumerate(loaded["texts"].tolist())}
            self.prompts = {text: row for row, text in enumerate(loaded["prompts"].tolist())}
        self._fingerprint = f"table:{hashlib.sha256(self.log_probs.tobytes()).hexdigest()[:16]}"

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    async def score(self, query: Query) -> Answer:
        rows = []
        for rendered in query.inputs:
            parts = {part.kind: part.text for part in rendered}
            found = self.log_probs[self.prompts[parts.get("prompt", "")], self.rows[parts["field"]]]
            rows.append(tuple(float(value) for value in found))
        return Answer(log_probs=tuple(rows), usage=Usage(requests=1))


async def build_table(file: Path, model: Path | None) -> None:
    """Score every sentence with every prompt."""
    federation = federation_of(0, Setting(exchange="losses"))
    examples = [one for part in (*federation.shards, federation.dev) for one in part]
    texts = sorted({str(one["text"]) for one in examples}, key=lambda text: (len(text), text))
    pairs = [(i, j) for i in range(WORDS) for j in range(WORDS)]
    prompts = list(dict.fromkeys(federation.vocabulary.text(pair) for pair in pairs))
    log_probs = np.empty((len(prompts), len(texts), 2), dtype=np.float32)
    async with OnnxBackend(model, threads=1) as backend:
        for row, prompt in enumerate(prompts):
            for at in range(0, len(texts), 64):
                batch = [{"text": text} for text in texts[at : at + 64]]
                query = query_for(federation.spec.task, prompt, batch, backend=backend)
                log_probs[row, at : at + 64] = (await backend.score(query)).log_probs
            if row % 50 == 0:
                print(f"table: {row} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    np.savez(file, log_probs=log_probs, texts=np.array(texts), prompts=np.array(prompts))


# The attackers


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack with the knowledge of a client, and of the other attackers.

    Attributes:
        losses: Maps losses, and which prompts contain the bad tokens, to other losses.
        alpha: Maps alpha before and after honest work, and the bad tokens, to another alpha.
    """

    losses: Callable[[Losses, NDArray[np.bool_], np.random.Generator], Losses] | None = None
    alpha: Callable[[Alpha, Alpha, list[int], np.random.Generator], Alpha] | None = None


def pushed(alpha: Alpha, bad: list[int], amount: float) -> Alpha:
    moved = alpha.copy()
    moved[np.arange(LENGTH), bad] += amount
    return moved


def quiet_push(losses: Losses, has_bad: NDArray[np.bool_], rng: np.random.Generator) -> Losses:
    """Return losses with honest mean and spread, ordered by the bad tokens only."""
    target = has_bad - has_bad.mean()
    if not has_bad.any() or has_bad.all():
        return losses
    return losses.mean() - losses.std() * target / target.std()


def quiet_alpha_push(
    before: Alpha, after: Alpha, bad: list[int], rng: np.random.Generator
) -> Alpha:
    """Return a step of honest length, towards the bad tokens."""
    return pushed(before, bad, float(np.linalg.norm(after - before)) / LENGTH**0.5)


def noise(before: Alpha, after: Alpha, bad: list[int], rng: np.random.Generator) -> Alpha:
    drawn = rng.normal(size=before.shape)
    return before + drawn * np.linalg.norm(after - before) / np.linalg.norm(drawn)


ATTACKS: dict[str, Attack] = {
    "random": Attack(
        losses=lambda losses, bad, rng: rng.uniform(0.0, 2.0 * losses.mean(), len(losses)),
        alpha=noise,
    ),
    "ascent": Attack(
        losses=lambda losses, bad, rng: 2.0 * losses.mean() - losses,
        alpha=lambda before, after, bad, rng: 2.0 * before - after,
    ),
    "ascent x10": Attack(
        losses=lambda losses, bad, rng: losses.mean() - 10.0 * (losses - losses.mean()),
        alpha=lambda before, after, bad, rng: before - 10.0 * (after - before),
    ),
    "huge": Attack(
        losses=lambda losses, bad, rng: rng.uniform(0.0, 1e6, len(losses)),
        alpha=lambda before, after, bad, rng: rng.uniform(0.0, 1e6, before.shape),
    ),
    "push": Attack(
        losses=lambda losses, bad, rng: np.where(bad, 0.0, losses + 2.0),
        alpha=lambda before, after, bad, rng: pushed(before, bad, 1.0),
    ),
    "quiet push": Attack(losses=quiet_push, alpha=quiet_alpha_push),
    "replace": Attack(alpha=lambda before, after, bad, rng: pushed(0.0 * before, bad, 1.0)),
}


class Attacked:
    """A transport that changes its client's updates and forwards all other calls."""

    def __init__(
        self, inner: Transport, attack: Attack, bad: list[int], method: Any, seed: int
    ) -> None:
        self._inner, self._attack, self._bad, self._method = inner, attack, bad, method
        self._rng = np.random.default_rng(seed)
        self._claimed: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def claim(self, credential: str, message: Any, **options: Any) -> Any:
        self._claimed = await self._inner.claim(credential, message, **options)
        return self._claimed

    async def update(
        self, credential: str, assignment_id: str, message: Any, **options: Any
    ) -> Any:
        changed = self._changed(message)
        return await self._inner.update(credential, assignment_id, changed, **options)

    def _changed(self, message: AlphaUpdate | LossesUpdate) -> AlphaUpdate | LossesUpdate:
        if isinstance(message, LossesUpdate):
            assert self._attack.losses is not None
            prompts = np.array([list(row) for row in self._claimed.prompts.rows()], dtype=int)
            has_bad = (prompts == self._bad).any(axis=1)
            losses = self._attack.losses(np.array(message.losses), has_bad, self._rng)
            losses = np.clip(losses, -1e6, 1e6)
            return message.model_copy(update={"losses": tuple(float(one) for one in losses)})
        assert self._attack.alpha is not None
        before, after = (
            from_wire(one).astype(float) for one in (self._claimed.alpha, message.alpha)
        )
        alpha = self._method.project(self._attack.alpha(before, after, self._bad, self._rng))
        return message.model_copy(update={"alpha": to_wire(alpha)})


# The runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One kind of run."""

    exchange: str
    defence: str = OFF
    attack: str | None = None
    share: float = 0.0


def federation_of(seed: int, setting: Setting) -> Federation:
    """Return the quickstart's federation in a setting."""
    path = assets.path("quickstart-mini.yaml")
    raw = RunSpec.load(path).model_dump(mode="json")
    raw |= {
        "prompt": {"length": LENGTH, "vocabulary": {**raw["prompt"]["vocabulary"], "size": WORDS}},
        "method": METHOD,
        "participation": {"exchange": setting.exchange},
        "defence": setting.defence,
        "calibration": "none",  # the attacks change plain losses
        "data": {**raw["data"], "num_clients": CLIENTS},
        "seed": seed,
        "rounds": ROUNDS,
        "budget": None,
        "evaluation": {"every": 0},
    }
    return Federation.load(RunSpec.model_validate(raw), path.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run: accuracy on dev, and the quarantined clients."""

    accuracy: float
    caught: int
    wronged: int


async def outcome(setting: Setting, seed: int, backend: TableBackend) -> Outcome:
    """One run."""
    federation = federation_of(seed, setting)
    spec = federation.spec
    method = method_from_spec(
        spec.method, Space.repeated(LENGTH, WORDS, federation.vocabulary.blank), seed=seed
    )
    attackers = set(random.Random(seed).sample(range(CLIENTS), round(setting.share * CLIENTS)))
    bad = worst_prompt(federation, backend)
    runs = []

    def between(number: int, plain: Transport) -> Transport:
        if number not in attackers or setting.attack is None:
            return plain
        return Attacked(plain, ATTACKS[setting.attack], bad, method, seed * 1000 + number)  # type: ignore[return-value]

    result = await simulate(
        federation,
        backend=backend,
        between=between,
        watch=lambda run, effect: runs.append(run) if effect is None else None,
    )
    assert result.status == "completed", result
    assert result.metric.after is not None
    out = runs[0].state.quarantined
    return Outcome(
        accuracy=result.metric.after, caught=len(out & attackers), wronged=len(out - attackers)
    )


def worst_prompt(federation: Federation, backend: TableBackend) -> list[int]:
    """Return the prompt with the largest loss on all clients' sentences, the attackers' target."""
    examples = [one for shard in federation.shards for one in shard]
    rows = [backend.rows[str(one["text"])] for one in examples]
    log_probs = backend.log_probs[:, rows].astype(float)
    right = np.array([int(one["label"]) for one in examples])
    picked = np.take_along_axis(log_probs, right[None, :, None], axis=2)[..., 0]
    losses = (np.logaddexp(log_probs[..., 0], log_probs[..., 1]) - picked).mean(axis=1)
    text = list(backend.prompts)[int(losses.argmax())]
    pairs = ((i, j) for i in range(WORDS) for j in range(WORDS))
    return list(next(pair for pair in pairs if federation.vocabulary.text(pair) == text))


def settings() -> list[Setting]:
    """Return all settings: each attack, and the honest run, with and without the defence."""
    return [
        Setting(exchange=exchange, defence=defence, attack=attack, share=share)
        for exchange in ("losses", "alpha")
        for attack, share in [
            (None, 0.0),
            *((attack, share) for share in (0.2, 0.1, 0.3) for attack in attacks_for(exchange)),
        ]
        for defence in (OFF, STANDARD)
    ]


def attacks_for(exchange: str) -> list[str]:
    """Return the attacks that are possible in an exchange."""
    return [name for name, attack in ATTACKS.items() if getattr(attack, exchange) is not None]


def main() -> None:
    """Run the settings that are not in the results file yet, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table", type=Path, required=True, help="the model's answers; created if absent"
    )
    parser.add_argument("--results", type=Path, help="JSON lines; settings in it are not run again")
    parser.add_argument("--model", type=Path, help="folder of the model; else the embedded one")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--exchange", choices=["losses", "alpha"], help="both by default")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    if not args.table.exists():
        asyncio.run(build_table(args.table, args.model))
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with TemporaryDirectory() as folder:
        results = Results(args.results or Path(folder) / "results.jsonl")
        backend = TableBackend(args.table)
        chosen = [one for one in settings() if args.exchange in (None, one.exchange)]
        for setting in chosen:
            for seed in seeds:
                if (setting, seed) not in results.known:
                    results.add(setting, seed, asyncio.run(outcome(setting, seed, backend)))
        report(chosen, results, seeds)


class Results:
    """Outcomes on disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.known: dict[tuple[Setting, int], Outcome] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            self.known[Setting(**row["setting"]), row["seed"]] = Outcome(**row["outcome"])

    def add(self, setting: Setting, seed: int, found: Outcome) -> None:
        self.known[setting, seed] = found
        row = {
            "setting": {name: getattr(setting, name) for name in Setting.__slots__},
            "seed": seed,
            "outcome": {name: getattr(found, name) for name in Outcome.__slots__},
        }
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def report(chosen: list[Setting], results: Results, seeds: range) -> None:
    """Print differences to the honest run without a defence, in points."""
    columns = ["exchange", "attackers", "attack", "defence", "accuracy", "difference"]
    columns += ["attackers in quarantine", "honest clients in quarantine"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for setting in chosen:
        ours = [results.known[setting, seed] for seed in seeds]
        theirs = [results.known[Setting(exchange=setting.exchange), seed] for seed in seeds]
        differences = 100 * np.array(
            [one.accuracy - other.accuracy for one, other in zip(ours, theirs, strict=True)]
        )
        error = differences.std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else float("nan")
        print(
            f"| {setting.exchange} | {setting.share:.0%} | {setting.attack or 'none'} "
            f"| {setting.defence} "
            f"| {np.mean([one.accuracy for one in ours]):.3f} "
            f"| {differences.mean():+.1f} ± {error:.1f} "
            f"| {np.mean([one.caught for one in ours]):.1f} of {round(setting.share * CLIENTS)} "
            f"| {np.mean([one.wronged for one in ours]):.1f} |"
        )


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
