"""What `privacy` costs a search: accuracy after so many queries, on a table of real answers.

    python -m tests.benchmarks.private_search

Each round is another device, which returns the mean losses of 5 prompts on random rows of a
table of docs/benchmarks/slot-tables, with the noise of `fedone_sdk.client.noise`. All rows of the
result have the same devices and mini-batches at the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.client.noise import private_losses
from fedone_sdk.spec.sections import PrivacySpec
from tests.attacks.gateway_labels import multiplier_for
from tests.benchmarks.slot_runs import TABLES, Contestant, Federation, Floats, Ints, Table, trial


@dataclass(frozen=True, kw_only=True)
class PrivateFederation(Federation):
    """Devices that take part once each, with noise.

    Attributes:
        privacy: None adds no noise.
    """

    privacy: PrivacySpec | None

    def mini_batch(self, round_number: int) -> list[int]:
        """Return the rows of a round's device."""
        rng = stream(stream_seed(self.seed, "partition", round_number))
        return list(map(int, rng.choice(len(self.table.targets), self.batch_size, replace=False)))

    def plain(self, prompts: Ints, round_number: int, *, own_bias: bool) -> Floats:
        """Return mean losses at the label bias of no prompt, with noise."""
        table, rows = self.table, self.mini_batch(round_number)
        bias = table.best(table.none).bias
        losses = [
            table._cross_entropy(table.log_probs[one], bias)[rows] for one in table.rows_of(prompts)
        ]
        if self.privacy is None:
            means: Floats = np.mean(losses, axis=1)
            return means
        return np.array(private_losses(np.array(losses).tolist(), self.privacy))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the result.

    Attributes:
        epsilon: Total of a device; None is without noise.
        releases: How often each device takes part. The noise of each release is that of a device
            which takes part so often; here it is another device each time.
        batch_size: Rows of a mini-batch.
    """

    epsilon: float | None
    releases: int = 1
    batch_size: int = 16


SETTINGS = (
    Setting(epsilon=None),
    *(Setting(epsilon=epsilon) for epsilon in (8, 4, 1)),
    Setting(epsilon=8, releases=10),
    Setting(epsilon=1, batch_size=64),
)


def lines(table: Table, budgets: list[int], seeds: int, clip: float) -> Iterator[str]:
    """Yield one line of Markdown per setting: accuracy, and the mean's standard error."""
    for setting in SETTINGS:
        multiplier, privacy = None, None
        if setting.epsilon is not None:
            multiplier = multiplier_for(setting.epsilon, setting.releases)
            privacy = PrivacySpec(clip=clip, noise_multiplier=multiplier)
        federation = partial(
            PrivateFederation,
            table=table,
            clients=1,
            batch_size=setting.batch_size,
            privacy=privacy,
        )
        contestant = Contestant(label="thompson", name="thompson", num_samples=5, calibrates=False)
        cells = []
        for queries in budgets:
            found = [
                100 * trial(contestant, federation(seed=seed), queries)["accuracy"]
                for seed in range(seeds)
            ]
            error = np.std(found, ddof=1) / np.sqrt(seeds)
            cells.append(f"{np.mean(found):.1f} ± {error:.1f}")
        epsilon = "no noise" if setting.epsilon is None else f"{setting.epsilon:g}"
        noise = "0" if multiplier is None else f"{multiplier:.2f}"
        facts = [table.name, epsilon, str(setting.releases), str(setting.batch_size), noise]
        yield f"| {' | '.join(facts + cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="*", default=["smollm2-sst2", "smollm2-feedback"])
    parser.add_argument("--budgets", nargs="*", type=int, default=[100, 300, 1000])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--clip", type=float, default=2.0)
    args = parser.parse_args()
    heads = ["cell", "epsilon of a device", "its updates", "its texts", "multiplier"]
    heads += [f"{queries:,} queries" for queries in args.budgets]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    for name in args.cells:
        table = Table(TABLES / f"{name}.npz")
        none = table.best(table.none).accuracy
        best = max(
            table.measured(one, table.best(table.none).bias).accuracy
            for one in range(len(table.prompts))
        )
        print(
            f"| {name} | no prompt {none:.1%}, best prompt {best:.1%} |" + " |" * (len(heads) - 2)
        )
        for line in lines(table, args.budgets, args.seeds, args.clip):
            print(line, flush=True)


if __name__ == "__main__":
    main()
