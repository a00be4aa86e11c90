"""figure-heterogeneity: the toy on clients whose classes differ more and more."""

from __future__ import annotations

from dataclasses import replace

from fedone_sdk.experiments.figure_toy import FigureToy

__all__ = ["FigureHeterogeneity"]


class FigureHeterogeneity(FigureToy):
    """The toy under IID, Dirichlet 0.5 and Dirichlet 0.1, side by side."""

    name = "figure-heterogeneity"
    title = "Queries against accuracy: the toy under IID, Dirichlet 0.5 and Dirichlet 0.1"
    design = replace(
        FigureToy.design,
        axes={**FigureToy.design.axes, "split": ("iid", "dirichlet0.5", "dirichlet0.1")},
    )
