"""The prompt artefact and the report of a run."""

from fedone_sdk.reports.artefact import (
    ArtefactEvaluation,
    LedgerReport,
    PromptArtefact,
    artefact_of,
    read_artefact,
)
from fedone_sdk.reports.contents import Change, changed_answers
from fedone_sdk.reports.forms import (
    FORMS,
    dspy_state,
    in_form,
    langfuse_prompt,
    mlflow_prompt,
    promptfoo_config,
    ready_text,
)
from fedone_sdk.reports.retuned import Retuned, retuned, retuned_artefact
from fedone_sdk.reports.source import ReportedRun, read_run, run_of_archive, start_of
from fedone_sdk.reports.use import Labelled, label_examples
from fedone_sdk.reports.verify import Check, check_against, check_artefact

__all__ = [
    "ArtefactEvaluation",
    "Change",
    "Check",
    "FORMS",
    "Labelled",
    "LedgerReport",
    "PromptArtefact",
    "ReportedRun",
    "Retuned",
    "artefact_of",
    "changed_answers",
    "check_against",
    "check_artefact",
    "dspy_state",
    "in_form",
    "label_examples",
    "langfuse_prompt",
    "mlflow_prompt",
    "promptfoo_config",
    "read_artefact",
    "read_run",
    "ready_text",
    "retuned",
    "retuned_artefact",
    "run_of_archive",
    "start_of",
]
