"""A comparison: entrants times seeds, and the trials that are still missing."""

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
from fedone_sdk.local import Federation
from fedone_sdk.spec import RunSpec

_DIGITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A table of entrants and seeds.

    Trials of one seed have the same clients, rows and candidates. As far as their settings agree,
    they also have the same clients per round and the same mini-batches. All of these are drawn from
    the run's seed, independent of the method.

    Attributes:
        name: Of the run.
        folder: Base of relative paths: the folder of RUN.yaml.
        entrants: In the order of the table; the others are compared with the first.
        seeds: Of the runs.
    """

    name: str
    folder: Path
    entrants: tuple[Entrant, ...]
    seeds: tuple[int, ...]

    def trials(self) -> list[Trial]:
        """Return all trials, seed by seed.

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
        """Return the records of these trials, by entrant and seed.

        Args:
            trials: All of the comparison.
            file: The file of records.
            model: Fingerprint of the model; None uses the latest in the file.
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
        """Return the results of the records; for the arguments see `results_of`."""
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
        """Yield the runs of a seed; equal data is read once."""
        read: dict[str, Federation] = {}
        for entrant in self.entrants:
            spec = entrant.seeded(seed)
            key = json.dumps(_document(spec, "data", "prompt", "task"))
            if key not in read:
                read[key] = Federation.load(spec, self.folder)
            federation = replace(read[key], spec=spec)
            if not federation.dev:
                raise SpecError("data.dev: is required, with rows, to compare methods")
            yield entrant, federation


def affordable(
    trials: Sequence[Trial],
    records: Mapping[tuple[str, int], TrialRecord],
    total: int | None,
    spent: int,
) -> list[Trial]:
    """Return the missing trials that a cap on training queries covers.

    A seed is included with all its entrants or not at all, because an unpaired trial is of no use.
    Each trial counts with its upper bound.

    Args:
        trials: All of the comparison.
        records: The existing records.
        total: The cap; None for no cap.
        spent: Training queries already spent.
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
    """Run trials in sequence; each is stored before it is yielded.

    Raises:
        FedOneError: A trial failed.
    """
    for trial in trials:
        record = await run_trial(trial, backend)
        file.append(record)
        yield trial, record


def _identity(entrant: Entrant, federation: Federation) -> str:
    """Return a digest of everything that determines the result, except the model."""
    spec = federation.spec
    document = [
        entrant.name,
        _document(spec, *(name for name in type(spec).model_fields if name not in _NO_PART)),
        _digest([federation.shards, federation.dev, federation.vocabulary.dump()]),
    ]
    return _digest(document)


_NO_PART = ("backend", "gateway", "name")
"""Fields of a run that do not affect results; the fingerprint identifies the model."""


def _document(spec: RunSpec, *names: str) -> dict[str, Any]:
    document = spec.model_dump(mode="json", include=set(names))
    if spec.participation.clients_per_round == 1 and "participation" in document:
        # With one client per round, aggregation does not affect the result.
        document["participation"]["aggregation"] = "examples"
    return document


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
