"""The experiments by name; a module is loaded when its experiment is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.experiment import Experiment

EXPERIMENTS: Mapping[str, str] = {
    "table1": "method_table:Table1",
    "table-fedavg": "method_table:TableFedavg",
    "table2": "table2:Table2",
    "table3": "table3:Table3",
    "figure-toy": "figure_toy:FigureToy",
    "figure-heterogeneity": "figure_toy:FigureHeterogeneity",
    "table-queries": "table_queries:TableQueries",
    "figure-prompt-length": "sweeps:FigurePromptLength",
    "table-clients": "sweeps:TableClients",
    "figure-theory": "figure_theory:FigureTheory",
}
"""The experiments of `fedone reproduce`: name -> ``module:class`` of this package."""


def find_experiment(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        SpecError: There is none of that name.
    """
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise SpecError(f"NAME: there is no experiment {name!r}; {known}", source="arguments")
    module, _, kind = EXPERIMENTS[name].partition(":")
    found: Experiment = getattr(import_module(f"fedone_sdk.experiments.{module}"), kind)()
    return found
