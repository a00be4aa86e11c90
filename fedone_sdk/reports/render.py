"""A report as one HTML file, or as Markdown with its figure."""

from __future__ import annotations

import base64
import re
import shlex
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

import fedone_sdk
from fedone_sdk.metrics import metric_text
from fedone_sdk.reports.contents import contents_of
from fedone_sdk.reports.figures import curves_svg
from fedone_sdk.reports.retuned import Retuned
from fedone_sdk.reports.source import ReportedRun

_SPECIAL = re.compile(r"([\\`*_\[\]|~&<>])")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def html_page(template: str, figure: str | None = None, **values: object) -> str:
    """One self-contained page, without network and scripts; all values are escaped."""
    if figure is not None:
        figure = f"data:image/svg+xml;base64,{base64.b64encode(figure.encode()).decode()}"
    return _environment(autoescape=True).get_template(template).render(figure=figure, **values)


def html_report(
    run: ReportedRun,
    moved: Retuned | None = None,
    artefact: Path | None = None,
    backend: Path | None = None,
) -> str:
    """Return the report as one HTML page."""
    svg = curves_svg(run) if run.result.history else None
    return html_page(
        "report.html.j2",
        svg,
        report=contents_of(run),
        moved=moved,
        artefact=None if artefact is None else str(artefact),
        backend=None if backend is None else str(backend),
    )


def markdown_report(run: ReportedRun, figure: str) -> tuple[str, str | None]:
    """Return the report as Markdown, and its SVG.

    Returns:
        The Markdown; and the SVG, or None for a run without rounds.
    """
    svg = curves_svg(run) if run.result.history else None
    template = _environment(autoescape=False).get_template("report.md.j2")
    return template.render(report=contents_of(run), figure=svg and figure), svg


def _inline(text: object) -> str:
    line = " ".join(str(text).split()) if "\n" in str(text) or "\r" in str(text) else str(text)
    return _SPECIAL.sub(lambda found: _ENTITIES.get(found[1], f"\\{found[1]}"), line)


def _fenced(text: str, language: str = "") -> str:
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    # A carriage return or another line separator would end the block's line.
    body = "\n".join(text.splitlines())
    return f"{fence}{language}\n{body}\n{fence}"


@cache
def _environment(*, autoescape: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader("fedone_sdk.reports"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": metric_text,
        "signed": "{:+.3f}".format,
        "inline": _inline,
        "fenced": _fenced,
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "shell": shlex.quote,
    }
    environment.globals["version"] = fedone_sdk.__version__
    return environment
