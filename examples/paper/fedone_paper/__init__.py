"""The paper's tables and figures, one command each.

1. Each table or figure is a `Study`: one run, the axes along which it differs, and seeds, in full
   and for ``--quick``; its methods are variants of `methods.METHODS`, and pilots choose rates.
2. A point of the grid and a seed make a `Trial`: a function (`federated`, `standalone`,
   `time_to_target`, `chat`, `toy`, `accounting`) of JSON options and input files.
3. The `engine` runs the trials that `records` does not hold yet, each in its own process or on Ray,
   and keeps every result as JSON.
4. A report makes Markdown tables (`summary.table`), figures (`figures.drawing`) and sentences of
   the results, with exact intervals (`statistics`), and computes nothing else.
5. `paper.yaml` holds what the paper prints, and every report shows it next to its own numbers.
"""

from fedone_paper.engine import run_experiment
from fedone_paper.experiment import EXPERIMENTS, Experiment, Report, find_experiment
from fedone_paper.settings import Settings

__all__ = [
    "EXPERIMENTS",
    "Experiment",
    "Report",
    "Settings",
    "find_experiment",
    "run_experiment",
]
