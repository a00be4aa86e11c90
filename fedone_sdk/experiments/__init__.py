"""The paper's tables and figures, one command each.

A `Study` declares one run, the axes along which it differs, and seeds, in full and for ``--quick``;
methods and their settings are those of `rows.METHODS`. Each point and seed is a `Trial`, a function
of its options and input files, that the engine runs in a process of its own or on Ray. Its result
is kept as JSON, and used again where function, options and inputs are the same. A report makes
tables, sentences and figures of the results and nothing else. What the paper prints stands in
`paper.yaml`, and every report shows it next to its own numbers.
"""

from fedone_sdk.experiments.engine import Engine, run_experiment
from fedone_sdk.experiments.experiment import Experiment, Report, Trial, Workspace
from fedone_sdk.experiments.registry import EXPERIMENTS, find_experiment
from fedone_sdk.experiments.settings import Settings

__all__ = [
    "EXPERIMENTS",
    "Engine",
    "Experiment",
    "Report",
    "Settings",
    "Trial",
    "Workspace",
    "find_experiment",
    "run_experiment",
]
