"""Methods and seeds on one run: which trials there are, and what is missing of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedone_sdk.backends import LLMBackend
from fedone_sdk.comparison.entrants import Entrant
from fedone_sdk.comparison.records import TrialFile, TrialRecord
from fedone_sdk.comparison.results import Results, results_of
from fedone_sdk.comparison.trials import Trial, run_trial
from fedone_sdk.errors import SpecError
from fedone_sdk.simulation import Federation
from fedone_sdk.spec import RunSpec

__all__ = ["Comparison", "affordable", "run_trials"]

_DIGITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A table of entrants and seeds.

    Trials of one seed have the same clients, the same rows on each, the same candidates, and, as
    far as their settings are the same, the same clients per round and the same mini-batches: all
    of these are drawn from the run's seed, and from nothing that a method does.

    Attributes:
        name: Of the run.
        folder: Where relative paths start: the folder of RUN.yaml.
        entrants: In the order of the table; the others are compared with the first.
        seeds: Of the runs.
    """

    name: str
    folder: Path
    entrants: tuple[Entrant, ...]
    seeds: tuple[int, ...]

    def trials(self) -> list[Trial]:
        """All trials, seed by seed.

        Raises:
            SpecError: The run names no data, or no dev split.
            DataError: A file or an example cannot be used.
        """
        return [
            Trial(entrant=entrant, federation=federation, identity=_identity(entrant, federation))
            for seed in self.seeds
            for entrant, federation in self._federations(seed)
        ]

    def known(
        self, trials: Sequence[Trial], file: TrialFile, model: str | None = None
    ) -> dict[tuple[str, int], TrialRecord]:
        """The records of these very trials, by entrant and seed.

        Args:
            trials: All of the comparison.
            file: Where records are kept.
            model: Fingerprint of the model; None is the one that answered last.
        """
        records = file.read()
        wanted = {trial.identity for trial in trials}
        mine = [record for record in records if record.identity in wanted]
        model = model or (mine[-1].model if mine else None)
        return {(record.entrant, record.seed): record for record in mine if record.model == model}

    def results(
        self,
        trials: Sequence[Trial],
        records: Mapping[tuple[str, int], TrialRecord],
        *,
        target: float | None = None,
    ) -> Results:
        """What the records say; arguments as of `results_of`."""
        federation = trials[0].federation
        return results_of(
            name=self.name,
            task=federation.spec.task,
            entrants=self.entrants,
            seeds=self.seeds,
            records=records,
            num_examples=len(federation.dev),
            target=target,
        )

    def _federations(self, seed: int) -> Iterator[tuple[Entrant, Federation]]:
        """The runs of a seed; data that is the same is read once."""
        read: dict[str, Federation] = {}
        for entrant in self.entrants:
            spec = entrant.seeded(seed)
            key = json.dumps(_document(spec, "data", "prompt", "task"))
            if key not in read:
                read[key] = Federation.load(spec, self.folder)
            federation = replace(read[key], spec=spec)
            if not federation.dev:
                raise SpecError("data.dev: is required, and must hold rows, to compare methods")
            yield entrant, federation


def affordable(
    trials: Sequence[Trial],
    records: Mapping[tuple[str, int], TrialRecord],
    total: int | None,
    spent: int,
) -> list[Trial]:
    """The missing trials that a cap on training queries pays for.

    A seed is run with all its entrants or not at all, since single trials have no pair. What a
    trial may take at most is held back for it.

    Args:
        trials: All of the comparison.
        records: Those that are there.
        total: The cap; None is none.
        spent: Training queries that count as spent already.
    """
    held, found = spent, list[Trial]()
    for seed in dict.fromkeys(trial.seed for trial in trials):
        missing = [
            trial
            for trial in trials
            if trial.seed == seed and (trial.entrant.name, seed) not in records
        ]
        asked = sum(trial.training_queries for trial in missing)
        if total is not None and held + asked > total:
            break
        held += asked
        found += missing
    return found


async def run_trials(
    trials: Sequence[Trial], backend: LLMBackend, file: TrialFile
) -> AsyncIterator[tuple[Trial, TrialRecord]]:
    """Runs trials one after the other; each is on the disk before it is given out.

    Raises:
        FedOneError: One could not go on.
    """
    for trial in trials:
        record = await run_trial(trial, backend)
        file.append(record)
        yield trial, record


def _identity(entrant: Entrant, federation: Federation) -> str:
    """What the result hangs on, but for the model."""
    spec = federation.spec
    document = [
        entrant.name,
        _document(spec, *(name for name in type(spec).model_fields if name not in _NO_PART)),
        _digest([federation.shards, federation.dev, federation.vocabulary.dump()]),
    ]
    return _digest(document)


_NO_PART = ("backend", "gateway", "name")
"""Fields of a run that change no result: whether the model is the same, its fingerprint says."""


def _document(spec: RunSpec, *names: str) -> dict[str, Any]:
    document = spec.model_dump(mode="json", include=set(names))
    if spec.participation.clients_per_round == 1 and "participation" in document:
        # Any mean of one alpha is that alpha: how clients count has no part in a result.
        document["participation"]["aggregation"] = "examples"
    return document


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
