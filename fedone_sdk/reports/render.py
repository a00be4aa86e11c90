"""A report as one HTML file."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import fedone_sdk
from fedone_sdk.messages import COMPARED
from fedone_sdk.metrics import metric_text
from fedone_sdk.reports.contents import contents_of
from fedone_sdk.reports.figures import curves_svg
from fedone_sdk.reports.retuned import Retuned
from fedone_sdk.reports.source import ReportedRun


def html_page(template: str, figures: Sequence[str] = (), **values: object) -> str:
    """One self-contained page, without network and scripts; all values are escaped."""
    images = [
        f"data:image/svg+xml;base64,{base64.b64encode(figure.encode()).decode()}"
        for figure in figures
    ]
    return _environment().get_template(template).render(figures=images, **values)


def html_report(
    run: ReportedRun,
    moved: Retuned | None = None,
    artefact: Path | None = None,
    backend: Path | None = None,
) -> str:
    """Return the report as one HTML page."""
    return html_page(
        "report.html.j2",
        curves_svg(run) if run.result.history else (),
        run=run,
        report=contents_of(run),
        moved=moved,
        artefact=artefact and str(artefact),
        backend=backend and str(backend),
        names=COMPARED,
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedone_sdk.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": metric_text,
        "signed": "{:+.3f}".format,
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "shell": shlex.quote,
    }
    environment.globals["version"] = fedone_sdk.__version__
    return environment
