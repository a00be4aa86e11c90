"""The files of a report: JSON, Markdown, figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedone_sdk
from fedone_paper.figures import images_of
from fedone_paper.settings import Settings
from fedone_paper.study import Report, Study
from fedone_sdk.evaluation.engine import Record, write_whole


def write_report(
    study: Study,
    settings: Settings,
    report: Report,
    records: Mapping[str, Record],
    failures: Mapping[str, str],
    folder: Path,
    *,
    command: str | None = None,
) -> tuple[dict[str, Any], tuple[Path, ...]]:
    """Write a report's Markdown, JSON and figures, each whole or not at all.

    Returns:
        The JSON document, and the files.
    """
    document: dict[str, Any] = {
        "name": study.name,
        "title": study.title,
        "command": command,
        "version": fedone_sdk.__version__,
        "quick": settings.quick,
        "trials": {
            key: {
                "seed": record.options.get("seed"),
                "version": record.version,
                "inputs": record.inputs,
                "wall_s": record.wall_s,
                "result": record.result,
            }
            for key, record in records.items()
        },
        "failed": dict(failures),
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    files: dict[Path, str | bytes] = {
        folder / f"{study.name}.md": _markdown(document, report.markdown, records),
        folder / f"{study.name}.json": text,
    }
    for name, draw in report.figures.items():
        files.update({folder / f"{name}.{kind}": data for kind, data in images_of(draw)})
    for file, content in files.items():
        write_whole(file, content)
    return document, tuple(files)


def _markdown(document: Mapping[str, Any], report: str, records: Mapping[str, Record]) -> str:
    trials, command = document["trials"].values(), document["command"]
    models = {str(one.result["model"]) for one in records.values() if one.result.get("model")}
    seeds = sorted({trial["seed"] for trial in trials if trial["seed"] is not None})
    seconds = math.fsum(trial["wall_s"] for trial in trials)
    facts = {
        "Command": f"`{command}`" if command else "",
        "SDK": ", ".join(sorted({trial["version"] for trial in trials})),
        "Model": ", ".join(f"`{model}`" for model in sorted(models)),
        "Seeds": ", ".join(map(str, seeds)),
        "Trials": f"{len(trials)}, one core each; {seconds:.0f} s one after another",
    }
    lines = [
        f"# {document['title']}",
        "",
        *(
            ["A quick run: it shows that everything works, and nothing else.", ""]
            * document["quick"]
        ),
        report.rstrip(),
        "",
        "## How this was made",
        "",
        *(f"- {name}: {text}" for name, text in facts.items() if text),
        *(f"- Failed: `{key}`: {message}" for key, message in document["failed"].items()),
        "",
    ]
    return "\n".join(lines)
