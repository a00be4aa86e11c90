"""A comparison as one HTML file."""

from __future__ import annotations

import base64

import fedone_sdk
from fedone_sdk.comparison.figure import comparison_svg
from fedone_sdk.comparison.results import Results
from fedone_sdk.comparison.table import header_of, row_of
from fedone_sdk.reports.render import html_environment


def comparison_html(results: Results, command: str | None = None) -> str:
    """Return one page without external resources or scripts."""
    figure = None
    if any(standing.trials for standing in results.standings):
        # Embedded as an image, so that the SVG's content cannot affect the page.
        figure = base64.b64encode(comparison_svg(results).encode()).decode()
    return _HTML.get_template("comparison.html.j2").render(
        results=results,
        header=header_of(results),
        rows=[row_of(results, standing) for standing in results.standings],
        figure=figure and f"data:image/svg+xml;base64,{figure}",
        command=command,
        version=fedone_sdk.__version__,
    )


_HTML = html_environment("fedone_sdk.comparison", "fedone_sdk.reports")
