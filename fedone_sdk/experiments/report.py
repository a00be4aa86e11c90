"""The files of a report: JSON, Markdown, figures."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fedone_sdk
from fedone_sdk.experiments.experiment import Draw, Experiment, Report
from fedone_sdk.experiments.records import Record, write_whole
from fedone_sdk.experiments.settings import Settings


def write_report(
    experiment: Experiment,
    settings: Settings,
    report: Report,
    records: Mapping[str, Record],
    failures: Mapping[str, str],
    folder: Path,
    *,
    command: str | None = None,
) -> tuple[dict[str, object], tuple[Path, ...]]:
    """Writes a report's Markdown, JSON and figures, each whole or not at all.

    Returns:
        The JSON document, and the files.
    """
    document: dict[str, object] = {
        "name": experiment.name,
        "title": experiment.title,
        "command": command,
        "version": fedone_sdk.__version__,
        "quick": settings.quick,
        "data": report.data,
        "trials": {
            key: {
                "seed": record.options.get("seed"),
                "version": record.version,
                "inputs": record.inputs,
                "wall_s": record.wall_s,
            }
            for key, record in records.items()
        },
        "failed": dict(failures),
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files: dict[Path, str | bytes] = {
        folder / f"{experiment.name}.md": _markdown(
            experiment, settings, report, records, failures, command
        ),
        folder / f"{experiment.name}.json": text,
    }
    for name, draw in report.figures.items():
        files.update({folder / f"{name}.{kind}": data for kind, data in _drawn(draw)})
    for file, content in files.items():
        write_whole(file, content)
    return document, tuple(files)


def _markdown(
    experiment: Experiment,
    settings: Settings,
    report: Report,
    records: Mapping[str, Record],
    failures: Mapping[str, str],
    command: str | None,
) -> str:
    versions = sorted({record.version for record in records.values()})
    models = sorted(
        {str(record.result["model"]) for record in records.values() if record.result.get("model")}
    )
    seeds = sorted(
        {seed for record in records.values() if (seed := record.options.get("seed")) is not None}
    )
    seconds = math.fsum(record.wall_s for record in records.values())
    facts = {
        "Command": f"`{command}`" if command else "",
        "SDK": ", ".join(versions),
        "Model": ", ".join(f"`{model}`" for model in models),
        "Seeds": ", ".join(map(str, seeds)),
        "Trials": f"{len(records)}, one core each; {seconds:.0f} s one after another",
    }
    lines = [
        f"# {experiment.title}",
        "",
        *(["A quick run: it shows that everything works, and nothing else.", ""] * settings.quick),
        report.markdown.rstrip(),
        "",
        "## How this was made",
        "",
        *(f"- {name}: {text}" for name, text in facts.items() if text),
        *(f"- Failed: `{key}`: {message}" for key, message in failures.items()),
        "",
    ]
    return "\n".join(lines)


def _drawn(draw: Draw) -> Iterator[tuple[str, bytes]]:
    """A figure's bytes by kind of file; the same figure gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "fedone"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        metadata: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}}
        for kind, facts in metadata.items():
            stream = io.BytesIO()
            figure.savefig(stream, format=kind, dpi=150, metadata=facts)
            yield kind, stream.getvalue()
