"""The prompt artefact and the report of a run."""

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

if TYPE_CHECKING:
    from fedone_sdk.reports.artefact import (
        ArtefactEvaluation,
        Labelled,
        LedgerReport,
        Prediction,
        PromptArtefact,
        artefact_of,
        label_examples,
        load_prompt,
    )
    from fedone_sdk.reports.figures import Line, Panel, svg_of
    from fedone_sdk.reports.forms import mlflow_prompt, program_of, ready_text
    from fedone_sdk.reports.pages import comparison_html, html_report
    from fedone_sdk.reports.source import ReportedRun, read_export, read_run
else:
    # Loaded on first use, so that the command's help does not load NumPy.
    __getattr__, __dir__ = lazy(globals(), "source artefact forms figures pages")

__all__ = [
    "ArtefactEvaluation",
    "Labelled",
    "LedgerReport",
    "Line",
    "Panel",
    "Prediction",
    "PromptArtefact",
    "ReportedRun",
    "artefact_of",
    "comparison_html",
    "html_report",
    "label_examples",
    "load_prompt",
    "mlflow_prompt",
    "program_of",
    "read_export",
    "read_run",
    "ready_text",
    "svg_of",
]
