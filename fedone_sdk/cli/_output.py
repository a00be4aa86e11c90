"""Output of commands: text for people, JSON for programs, and the result of a run."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from operator import methodcaller
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.filesize import decimal as size_text
from rich.text import Text

from fedone_sdk.budget import Usage
from fedone_sdk.errors import ArgumentError, system_errors
from fedone_sdk.files import replace_file
from fedone_sdk.messages import COMPARED, ProposerReport, RunDevices, RunResult, Verdict
from fedone_sdk.metrics import metric_text

T = TypeVar("T")


def terminal(*, stderr: bool = False) -> Console:
    """Return a console without markup, because a prompt may look like markup."""
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=True)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters of a terminal. A text from a device or a server may contain them."""


def say(text: str) -> None:
    """Print a text and flush; on a terminal, control characters are replaced."""
    if sys.stdout.isatty():
        text = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a line to stderr."""
    print(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text), file=sys.stderr, flush=True)


class Output:
    """Prints a command's result for people, and writes it to the JSON file.

    Call `write_json` before printing, so that a closed output pipe loses no paid result.
    """

    def __init__(self, json_file: Path | None) -> None:
        self._to_stdout = json_file == Path("-")
        self._file = None if self._to_stdout else json_file
        self.console = terminal(stderr=self._to_stdout)
        check_target("--json", self._file)

    def write_json(self, document: T) -> T:
        """Write a document, which may contain pydantic models, and return it."""
        # Standard output may have any encoding, so JSON for it is ASCII.
        default = methodcaller("model_dump", mode="json")
        text = json.dumps(document, indent=2, ensure_ascii=self._to_stdout, default=default) + "\n"
        if self._to_stdout:
            say(text)
        elif self._file is not None:
            write_file("--json", self._file, text)
        return document

    def heading(self, text: str) -> None:
        """Print a heading."""
        self.console.print(Text(text, style="bold"))

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print each fact in one line, as ``name  value``."""
        width = max(map(len, facts))
        for name, value in facts.items():
            shown = printable(value)
            self.console.print(Text.assemble("  ", (name.ljust(width), "dim"), "  ", shown))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print columns, the first left-aligned, the others right-aligned."""
        cells = [header, *([printable(cell) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for number, (first, *others) in enumerate(cells):
            right = map(str.rjust, others, widths[1:])
            line = "  ".join(["", first.ljust(widths[0]), *right]).rstrip()
            self.console.print(Text(line, style="" if number else "bold"))


def check_target(option: str, target: Path | None) -> None:
    """Check that a file can be written and is no input, before the command does its work."""
    if target is None:
        return
    path = _resolved(target)
    # Pipes and devices need no write access to their folder.
    needed = path if _is_special(path) else path.parent
    if not os.path.isdir(path.parent):
        raise ArgumentError(f"{option}: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise ArgumentError(f"{option}: {target} is a folder")
    if not os.access(needed, os.W_OK):
        raise ArgumentError(f"{option}: {needed} cannot be written to")
    real = os.path.realpath(path)
    same = [place for place, file in _named_files() if os.path.realpath(file) == real]
    if len(same) > 1 and not _is_special(path):
        place = max(same)  # Prefers "named in FILE", which says more.
        raise ArgumentError(f"{option}: {target} is also {place}")


def _named_files() -> Iterator[tuple[str, str]]:
    """Yield each file that an argument, or a YAML file among them, names, and where it is named."""
    import yaml

    for word in sys.argv[1:]:
        file = Path(re.sub("^(--[^=]*=?|-.)", "", word))
        if file.suffix or file.is_file():  # Without a dot, it may be the id of a run.
            yield "another argument's file", str(file)
        # An invalid file is reported when it is loaded.
        with suppress(OSError, UnicodeError, yaml.YAMLError):
            text = file.read_text("utf-8") if file.suffix in (".yaml", ".yml") else ""
            for value in (str(getattr(token, "value", "")) for token in yaml.scan(text)):
                if Path(value).suffix and "\0" not in value:
                    yield f"named in {file}", str(file.parent / value)


def write_file(option: str, target: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Write or replace a file atomically; errors name the option.

    A symbolic link is kept, and the file that it names is replaced. Pipes and devices are written
    directly. The process's umask applies to `mode`.
    """
    content = data.encode() if isinstance(data, str) else data
    path = _resolved(target)
    with system_errors(ArgumentError, f"{option}: {target}"):
        if _is_special(path):
            path.write_bytes(content)
        else:
            replace_file(path, content, mode=mode)


def _resolved(target: Path) -> Path:
    if not target.is_symlink() or _is_special(target):
        return target
    return Path(os.path.realpath(target))


def _is_special(path: Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def printable(text: str) -> str:
    """Replace control characters, which a text from a device may contain."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def money(usage: Usage, *, priced: bool) -> str:
    """Return a cost in US dollars; ``unknown`` if a price is not known."""
    return f"{usage.usd:.4f}" if priced else "unknown"


def cost_text(usage: Usage, *, priced: bool) -> str:
    """Return a usage as text: requests, prompt tokens and US dollars."""
    return (
        f"{plural(usage.requests, 'request')}, {usage.prompt_tokens} prompt tokens, "
        f"USD {money(usage, priced=priced)}"
    )


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 round``, ``2 rounds``, ``2 queries``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


def moment(seconds: float) -> str:
    """Return a time since the epoch as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def exit_code(result: RunResult) -> int:
    """Return 0 for a success, 130 after Ctrl-C, 1 for a failed or paused run.

    A run whose caps did not suffice for one round counts as failed.
    """
    if result.status == "stopped":
        return 1 if _paused(result) else 130
    return int(result.status == "failed" or not result.rounds)


def is_resumable(result: RunResult) -> bool:
    """Return whether the same command continues the run: it is paused, or Ctrl-C stopped it."""
    return result.status == "stopped" and (_paused(result) or result.reason == "interrupted")


def _paused(result: RunResult) -> bool:
    return (result.reason or "").startswith("paused: ")


def print_result(output: Output, result: RunResult, *, num_clients: int | None = None) -> None:
    """Print the results and the cost of a run."""
    spent, cap = result.spent, result.cap.queries
    usd = "" if result.cap.usd is None else f" of {result.cap.usd:g}"
    reason = f" ({result.reason})" if result.reason else ""
    clients = {name for entry in result.history for name in entry.client_id.split(",")}
    prompt, verdict = result.prompt, result.verdict
    cheapest = None if verdict is None else verdict.standing("cheapest")
    facts = {
        "status": f"{result.status}{reason}, {plural(result.rounds, 'round')}",
        "verdict": None if verdict is None else verdict.text,
        "prompt so far" if result.status == "stopped" else "prompt": repr(prompt.text),
        **{f"  {slot.name}": repr(slot.text) for slot in prompt.slots or ()},
        "label words": None
        if prompt.labels is None
        else ", ".join(map(repr, prompt.labels.values())),
        "label bias": None
        if prompt.bias is None
        else f"{bias_text(prompt.bias)} (part of the prompt)",
        "cheaper prompt": None
        if cheapest is None or cheapest.prompt is None
        else repr(cheapest.prompt.text),
        # Shown only if the verdict has no table of prompts.
        f"{result.metric.name} on dev": None
        if verdict is not None and verdict.standings
        else ", ".join(
            f"{COMPARED[one.name].lower()} {metric_text(one.value)}" for one in result.standings
        ),
        "queries": f"{spent.queries}{'' if cap is None else f' of {cap}'}"
        f" (evaluation: {result.evaluation.queries} more)",
        "billed requests": f"{spent.requests} (of them evaluation: {result.evaluation.requests}), "
        f"{spent.prompt_tokens} prompt tokens, USD {money(spent, priced=result.priced)}{usd}",
        "proposer": None if result.proposer is None else _proposer(result.proposer, result.priced),
        "judge": None if result.judge is None else cost_text(result.judge, priced=result.priced),
        "judge's preference": None
        if verdict is None or verdict.preference is None
        else verdict.preference.text,
        "cache hits": f"{result.cache.hits}",
        "clients": f"{len(clients)}{'' if num_clients is None else f' of {num_clients}'} took part",
        "devices": None if result.devices is None else _devices(result.devices),
        "traffic": f"{size_text(result.communication.upload_bytes)} up, "
        f"{size_text(result.communication.download_bytes)} down",
        "time": f"{result.wall_s:.1f} s",
        "alpha_sha256": result.alpha_sha256,
        "censored": f"{result.censoring.censored} of {result.censoring.values} label "
        "log-probabilities are only upper bounds"
        if result.censoring.censored
        else None,
    }
    output.heading(f"{result.name} (run {result.run_id}, seed {result.seed})")
    output.facts({name: text for name, text in facts.items() if text is not None})
    if result.lineage:
        output.console.print()
        header = ["new candidate", "client", "loss reduction", "deployed", "parent"]
        output.table(header, [one.cells for one in result.lineage])
    if verdict is not None and verdict.standings:
        output.console.print()
        output.table(*_standings(result.metric.name, verdict))


def _proposer(report: ProposerReport, priced: bool) -> str:
    failed = f", {report.failed} failed (the last: {report.failure})" if report.failed else ""
    return (
        f"{plural(report.calls, 'call')}{failed}; {plural(report.added, 'candidate')} added, "
        f"{report.dropped} dropped; USD {money(report.spent, priced=priced)}"
    )


def _standings(metric: str, verdict: Verdict) -> tuple[list[str], list[list[str]]]:
    rows = f"{metric} on {verdict.examples} dev rows"
    header = [rows, "value", "95 % interval", "gain of tuned prompt", "95 % interval of gain"]
    return header, [
        [
            COMPARED[one.name],
            metric_text(one.value),
            "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval),
            *(
                ("-", "-")
                if one.gain is None
                else (f"{one.gain.value:+.3f}", f"{one.gain.low:+.3f} to {one.gain.high:+.3f}")
            ),
        ]
        for one in verdict.standings
    ]


def _devices(devices: RunDevices) -> str:
    reasons = "; ".join(f"{one.reason} ({one.devices})" for one in devices.unfit)
    counts = f"{devices.connected} connected, {devices.fit} of them fit the run"
    return f"{counts}; unfit: {reasons}" if reasons else counts


def bias_text(bias: Sequence[float]) -> str:
    """Return a label bias in the form of ``--bias``: one number per label."""
    return ",".join(f"{value:.4g}" for value in bias)
