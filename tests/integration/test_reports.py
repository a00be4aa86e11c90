"""The report: its content, its escaping, its programs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedone_sdk.backends import OpenAIBackend, query_for
from fedone_sdk.backends.build import build_backend
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports import artefact_of, read_export
from fedone_sdk.reports.forms import program_of
from fedone_sdk.reports.pages import MAX_CLIENTS, clients_of, confusion_of, costs_of, html_report
from fedone_sdk.reports.source import ReportedRun
from fedone_sdk.spec import BackendSpec, RunSpec
from fedone_sdk.trackers.tracker import params_of
from tests.fake_openai import FakeOpenAI, Script
from tests.integration.tuned import ROWS, SPEC, small, tuned

HOSTILE = (
    "</pre></code><script>alert(1)</script><img src=x onerror=alert(2)>'\"`{{7*7}}\n```\n# |$x$"
)


class Page(HTMLParser):
    """A page's elements, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def chart_of(page: Page) -> tuple[str, ElementTree.Element]:
    """Its first image: the text and what it parses to."""
    image, *_ = images = [attributes for name, attributes in page.elements if name == "img"]
    assert all(one["alt"] for one in images)
    text = base64.b64decode((image["src"] or "").partition(",")[2]).decode()
    return text, ElementTree.fromstring(text)


def hostile(run: ReportedRun) -> ReportedRun:
    """A malicious run, as far as its file allows."""
    prompt = PromptReport(text=HOSTILE, tokens=(HOSTILE, ""), bias=(0.0, 0.5))
    history = tuple(
        entry.model_copy(update={"client_id": HOSTILE.replace(",", "")})
        for entry in run.result.history
    )
    metric = run.result.metric.model_copy(update={"name": HOSTILE})
    result = run.result.model_copy(
        update={
            "name": HOSTILE,
            "run_id": HOSTILE,
            "reason": HOSTILE,
            "model": HOSTILE,
            "models": (HOSTILE,),
            "prompt": prompt,
            "history": history,
            "metric": metric,
            "alpha_sha256": HOSTILE,
        }
    )
    assert run.spec is not None
    template = f"{HOSTILE.replace('{', '{{').replace('}', '}}')} {{prompt}} {{text}}"
    task = run.spec.task.model_copy(
        update={"template": template, "labels": {HOSTILE: HOSTILE, "1": " great"}}
    )
    spec = run.spec.model_copy(update={"task": task})
    return replace(run, result=result, spec=spec, untrained=prompt)


async def test_a_report_has_the_results_of_the_run() -> None:
    done = await small()
    run = done.run
    page = Page(html_report(run))
    result = done.result
    assert result.prompt.text in page.text
    assert run.untrained is not None
    assert run.untrained.text in page.text
    for value in (result.metric.no_prompt, result.metric.before, result.metric.after):
        assert value is not None
        assert f"{value:.3f}" in page.text
    assert result.alpha_sha256 in page.text
    assert all(entry.client_id in page.text for entry in result.history)
    headings = ["Was it worth it?", "Prompt", "Curves", "Confusion matrix", "Cost", "Clients",
                "How to use it"]  # fmt: skip
    places = [page.text.index(f"\n{title}\n") for title in headings]
    assert places == sorted(places)
    # The verdict comes before all numbers.
    assert result.verdict is not None
    assert result.verdict.text[1:] in page.text[places[0] : page.text.index("One answer for")]


async def test_its_numbers_are_those_of_the_run() -> None:
    done = await small()
    _, confusion = confusion_of(done.run)
    metric = done.result.metric
    lines = {line.name: line for line in done.result.standings}
    assert list(lines) == ["chance", "no_prompt", "no_prompt_biased", "untrained", "tuned"]
    assert metric.after is not None
    for name, value in {"no_prompt": metric.no_prompt, "untrained": metric.before}.items():
        gain = lines[name].gain
        assert gain is not None
        assert lines[name].value == pytest.approx(value)
        assert gain.value == pytest.approx(metric.after - (value or 0))
    counts = [count for _, row in confusion for count in row]
    right = sum(row[index] for index, (_, row) in enumerate(confusion))
    assert (sum(counts), right / sum(counts)) == (12, pytest.approx(metric.after))
    assert ("Training queries", "32", "48") in costs_of(done.run)
    clients = clients_of(done.run)
    assert sum(rounds for _, rounds, _, _ in clients) == done.result.rounds
    assert sum(share for _, _, share, _ in clients) == pytest.approx(1.0)


async def test_the_page_needs_nothing_else() -> None:
    page = Page(html_report((await small()).run))
    assert not {"script", "link", "iframe", "object", "embed", "base"} & {
        name for name, _ in page.elements
    }
    for name, attributes in page.elements:
        for key in ("src", "href", "srcset", "action", "data", "background"):
            value = attributes.get(key)
            assert value is None or value.startswith("data:image/svg+xml;base64,"), (name, key)
        assert not any(key.startswith("on") for key in attributes)
        assert "url(" not in (attributes.get("style") or "")
    (policy,) = [a for name, a in page.elements if name == "meta" and "http-equiv" in a]
    assert (policy["content"] or "").startswith("default-src 'none';")
    _, svg = chart_of(page)
    for element in svg.iter():
        assert not element.tag.endswith("}script")
        for key, value in element.attrib.items():
            assert not key.endswith("href") or value.startswith("#")
    assert "accuracy on dev" in "".join(svg.itertext())


async def test_hostile_text_stays_text_in_html() -> None:
    run = (await small()).run
    text = html_report(hostile(run))
    page, plain = Page(text), Page(html_report(run))
    # Not one element more than a harmless run has; labels and tokens have as many there.
    assert {name for name, _ in page.elements} <= {name for name, _ in plain.elements}
    assert len([1 for name, _ in page.elements if name == "img"]) == 2
    assert "<script" not in text
    assert "<img src=x" not in text
    assert HOSTILE in page.text
    assert "{{7*7}}" in page.text


async def test_many_clients_are_counted() -> None:
    done = await small()
    entry = done.result.history[0]
    history = tuple(
        entry.model_copy(update={"round": number, "client_id": f"one,client-{number:03}"})
        for number in range(50)
    )
    run = replace(done.run, result=done.result.model_copy(update={"history": history}))
    assert clients_of(run)[0][:2] == ("one", 50)
    text = Page(html_report(run)).text
    assert f"{51 - MAX_CLIENTS} more clients" in text


async def test_a_task_without_labels() -> None:
    done = await tuned(
        task={"template": "{prompt} {text}", "loss": "score", "max_tokens": 4, "score": "a:b"}
    )
    run = done.run
    assert confusion_of(run) == ([], [])
    line = run.result.standings[-1]
    assert (line.name, line.value, line.interval) == ("tuned", 0.5, (0.5, 0.5))
    assert "less is better" in Page(html_report(run)).text


async def test_a_metric_name_is_no_formula() -> None:
    run = (await small()).run
    metric = run.result.metric.model_copy(update={"name": "$\\frac{$ \x00\x1b"})
    text = html_report(replace(run, result=run.result.model_copy(update={"metric": metric})))
    _, svg = chart_of(Page(text))
    assert "$\\frac{$" in "".join(svg.itertext())


async def test_no_key_is_in_what_is_left_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a provider repeats it: that ends the run, and its words are the reason."""
    key = "sk-right-12345678"
    monkeypatch.setenv("OUR_KEY", key)
    script = Script({12: "bad_key"})
    async with FakeOpenAI(key=key, models={"fake-1": {}}, script=script) as server:
        backend = BackendSpec(
            kind="openai", model="fake-1", base_url=server.base_url, api_key_env="OUR_KEY"
        )
        async with build_backend(backend) as model:
            done = await tuned(backend=model, backend_spec=backend.model_dump())
    assert done.result.status == "stopped"
    assert "OUR_KEY" in (done.result.reason or "")
    run = done.run
    page = html_report(run)
    assert "OUR_KEY" in page
    params = json.dumps(params_of(run.spec)) if run.spec else ""
    for text in (page, artefact_of(run).dump(), params):
        assert key not in text
        assert "12345678" not in text


async def test_the_same_run_gives_the_same_report() -> None:
    first, second = [read_export((await small()).export) for _ in range(2)]
    assert html_report(first) == html_report(second)


# The programs of a report


def spec_of(backend: dict[str, Any] | None = None, **task: Any) -> RunSpec:
    document = {**SPEC, "task": {**SPEC["task"], **task}}
    if backend is not None:
        document["backend"] = {"kind": "openai", "model": "fake-1", **backend}
    return RunSpec.model_validate(document)


async def run_program(code: str, texts: list[str], folder: Path) -> list[str | None]:
    """Run a report's program as its reader would: saved, and called with some texts."""
    calls = f"import json\nprint(json.dumps([ask(text=text) for text in {texts!r}]))\n"
    (folder / "program.py").write_text(f"{code}\n{calls}", encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "program.py"),
        cwd=folder,
        env={"OUR_KEY": "sk-right", "PATH": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: list[str | None] = json.loads(out)
    return found


@pytest.mark.parametrize(("api", "bias"), [("chat", (0.0, 1.5)), ("completions", None)])
async def test_the_programs_give_the_labels_of_the_sdk(
    api: str, bias: tuple[float, float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-right")
    async with FakeOpenAI(key="sk-right", models={"fake-1": {}}) as server:
        # Where it is asked and which variable has the key are the run's, not OpenAI's.
        backend = {"api": api, "base_url": server.base_url, "api_key_env": "OUR_KEY"}
        run = (await small()).run
        assert run.spec is not None
        spec = spec_of(backend, template='{prompt} "{text}" {{quoted}} isn\'t it')
        prompt = PromptReport(text=" {bra}\\ces 'and' \"quotes\"", tokens=(), bias=bias)
        texts = [str(row["text"]) for row in ROWS] + ["{text} and \\n é"]
        artefact = artefact_of(run).model_copy(
            update={"task": spec.task, "prompt": prompt, "model": None}
        )
        async with OpenAIBackend(
            "fake-1", base_url=server.base_url, api="chat" if api == "chat" else "completions"
        ) as model:
            labels = [(await artefact.predict({"text": text}, model)).label for text in texts]
        before = len(server.received)
        sent = sorted(json.dumps(row.body.get("messages", row.body.get("prompt")))
                      for row in server.received)  # fmt: skip
        program, note = program_of(spec.task, prompt, spec.backend)
        assert note == ""
        assert await run_program(program, texts, tmp_path) == labels
        assert sent == sorted(
            json.dumps(row.body.get("messages", row.body.get("prompt")))
            for row in server.received[before:]
        )
        assert len(set(labels)) == 2


async def test_the_programs_where_the_model_shows_no_log_probabilities(tmp_path: Path) -> None:
    async with FakeOpenAI(log_probs="unsupported", models={"fake-1": {}}) as server:
        server.model.write = lambda text, most: (  # type: ignore[method-assign]
            "Great." if "fine" in text else "terrible" if "bad" in text else "who knows"
        )
        backend = {"log_probs": False, "base_url": server.base_url, "api_key_env": "OUR_KEY"}
        spec = spec_of(backend, loss="zero_one")
        prompt = PromptReport(text="Well:", tokens=())
        program, note = program_of(spec.task, prompt, spec.backend)
        assert "JSON schema" in note
        assert await run_program(program, ["fine", "bad", "neither"], tmp_path) == ["1", "0", None]


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_the_programs_of_a_task_that_writes(tmp_path: Path, api: str) -> None:
    """They send what the run sends: with the schema in a chat, with stop words in a completion."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    score = {"json_fields": {"schema": schema}} if api == "chat" else "exact_match"
    async with FakeOpenAI(models={"fake-1": {}}) as server:
        spec = spec_of(
            {"base_url": server.base_url, "api_key_env": None, "api": api},
            template="Question: {prompt} {text}",
            loss="score",
            labels={},
            max_tokens=5,
            score=score,
        )
        prompt = PromptReport(text="Go on:", tokens=())
        program, _ = program_of(spec.task, prompt, spec.backend)
        (written,) = await run_program(program, ["so"], tmp_path)
        async with build_backend(spec.backend) as model:
            query = query_for(spec.task, "Go on:", [{"text": "so"}], backend=model)
            assert (await model.score(query)).texts == (written,)
        ours, theirs = server.received[-1].body, server.received[-2].body
        assert ours == theirs
        assert ("response_format" in ours) is (api == "chat")


def test_where_no_such_program_can_be_written() -> None:
    prompt = PromptReport(text=" x", tokens=(" x",))

    def of(model: str | None = None, **task: Any) -> tuple[str, str]:
        spec = spec_of(**task)
        return program_of(spec.task, prompt, spec.backend, model)

    program, note = of(loss="nll", labels={}, metric="loss")
    assert (program, "scores given texts" in note) == ("", True)
    assert of("onnx:roberta-mini:0")[0]
    program, note = of("vllm:m:512")  # A run of a server whose model is another one.
    assert (program, "vllm:m:512" in note) == ("", True)


@pytest.mark.parametrize("bias", [None, (0.0, 1.5)])
async def test_the_program_of_a_local_model_queries_that_model(
    bias: tuple[float, float] | None, tmp_path: Path
) -> None:
    template = "{prompt} {text} It was {mask}."
    spec = spec_of(template=template)
    prompt = PromptReport(text=" 'Well' {so}", tokens=(), bias=bias)
    program, note = program_of(spec.task, prompt, spec.backend)
    assert (note, "openai" in program) == ("", False)
    texts = [str(row["text"]) for row in ROWS[:6]] + ["{text} \\n é"]
    artefact = artefact_of((await small()).run).model_copy(
        update={"task": spec.task, "prompt": prompt, "model": None}
    )
    async with build_backend(spec.backend) as model:
        labels = [(await artefact.predict({"text": text}, model)).label for text in texts]
    assert await run_program(program, texts, tmp_path) == labels


async def test_the_charts_suit_a_phone_and_the_dark() -> None:
    text, svg = chart_of(Page(html_report((await small()).run)))
    width, height = (float(svg.attrib[key].removesuffix("pt")) for key in ("width", "height"))
    assert height < width < 375  # as wide as a phone
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px|font: ([\d.]+)px", text)
             for size in size if size]  # fmt: skip
    assert min(sizes) >= 9
    start = text.index("@media (prefers-color-scheme: dark)")
    dark = text[start : text.index("</style>", start)]
    named = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.replace(dark, "")))
    # No colour stays as it is on a dark page, and nothing is drawn in white or black.
    assert named
    assert all(f"stroke: {colour}" in dark for colour in named)


def test_how_other_servers_call_the_limit() -> None:
    def code(**backend: Any) -> str:
        spec = spec_of(backend)
        return program_of(spec.task, PromptReport(text="", tokens=()), spec.backend)[0]

    assert "max_completion_tokens=1" in code()
    assert "max_tokens=1" in code(base_url="http://localhost:1/v1")
    assert 'reasoning_effort="none"' in code(reasoning_effort="none")
