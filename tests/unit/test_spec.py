"""RUN.yaml: valid files, and one clear line per error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fedone_sdk.budget import Budget
from fedone_sdk.errors import SpecError
from fedone_sdk.spec import GradientSpec, RunSpec, load_yaml, validate_spec
from fedone_sdk.vocabulary import build_vocabulary

# As in the design.
RUN_YAML = """
name: sst2
task:    {template: "{prompt} {sentence} It was {mask}.", labels: {0: " terrible", 1: " great"}, metric: accuracy}
data:    {train: sst2/train.jsonl, dev: sst2/dev.jsonl, num_clients: 100, shots: 16}
prompt:  {length: 20, vocabulary: {kind: pmi, size: 200}}
method:  {name: gs-bdpl, num_samples: 20, tau: 0.1, optimizer: adamw, learning_rate: 3.0e-4, local_steps: 1, batch_size: 32}
participation: {clients_per_round: 1, exchange: alpha}   # exchange: alpha or losses
budget:  {queries: 2000}
rounds:  100
evaluation: {every: 10, examples: 256}
backend: {kind: onnx}
seed: 0
"""  # noqa: E501

SMALL: dict[str, Any] = {
    "task": {
        "template": "{prompt} {sentence} It was {mask}.",
        "labels": {0: " terrible", 1: " great"},
    },
    "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": ["a", "b"]}},
}


def edited(path: str, value: object) -> dict[str, Any]:
    """The small spec with one key set."""
    document: dict[str, Any] = {**SMALL, "prompt": dict(SMALL["prompt"])}
    *parents, last = path.split(".")
    inner = document
    for parent in parents:
        inner[parent] = dict(inner.get(parent, {}))
        inner = inner[parent]
    inner[last] = value
    return document


def problems(document: object) -> list[str]:
    with pytest.raises(SpecError) as excinfo:
        validate_spec(RunSpec, document, source="run.yaml")
    lines = str(excinfo.value).splitlines()
    assert lines == [f"run.yaml: {problem}" for problem in excinfo.value.problems]
    return excinfo.value.problems


def test_the_design_s_run_loads(tmp_path: Path) -> None:
    path = tmp_path / "RUN.yaml"
    path.write_text(RUN_YAML, encoding="utf-8")
    spec = RunSpec.load(path)
    assert spec.name == "sst2"
    assert spec.task.label_words == (" terrible", " great")
    assert spec.budget == Budget(queries=2000)
    assert spec.data is not None
    assert spec.data.num_clients == 100
    # What it writes out are the defaults of the paper's method.
    assert spec == spec.model_copy(update={"method": GradientSpec()})
    default = RunSpec.model_validate({**SMALL, "method": {"name": "gs-bdpl"}})
    assert spec.participation == default.participation


@pytest.mark.parametrize(
    ("name", "exchange"),
    [("thompson", "losses"), ("random", "losses"), ("tpe", "losses"), ("own", "losses"),
     ("gs-bdpl", "alpha"), ("bdpl", "alpha"), (None, "losses")],
)  # fmt: skip
def test_the_exchange_follows_the_method(name: str | None, exchange: str) -> None:
    method = {} if name is None else {"method": {"name": name}}
    if name == "own":
        method["method"]["object"] = "module:Method"
    spec = RunSpec.model_validate({**SMALL, **method})
    assert (spec.method.name, spec.participation.exchange) == (name or "thompson", exchange)
    given = {"participation": {"clients_per_round": 1, "exchange": "losses"}}
    assert RunSpec.model_validate({**SMALL, **method, **given}).participation.exchange == "losses"
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("rounds", 0, "rounds: input should be greater than or equal to 1 (got 0)"),
        ("seed", 2**53, "seed: "),
        ("name", "a/b", "name: "),
        ("budget", {}, "budget: needs at least one cap"),
        ("budget.euro", 5, "budget.euro: unknown key (allowed: completion_tokens, prompt_tokens, "
         "queries, requests, tokens, usd)"),
        ("budget.usd", "NaN", "budget.usd: "),
        ("method.tau", 0.3, "method.name: is required"),
        ("prompt.vocabulary", {"kind": "magic"}, "prompt.vocabulary.kind: 'magic' is not one of"),
        ("participation.deadline_s", float("nan"), "participation.deadline_s: "),
        ("backend", {"kind": "litellm"}, "backend.kind: input should be 'onnx', "),
        ("method", "evolution", "method: 'evolution' is not one of 'gs-bdpl', 'bdpl', 'thompson'"),
        ("rounds", True, "rounds: must be a number, not true or false"),
        ("roudns", 3, "roudns: unknown key (allowed: backend, budget, calibration, data, defence, "
         "evaluation, method, name, participation, privacy, prompt, rounds, seed, task)"),
        ("method", {"name": "gs-bdpl", "estimator": "zero"},
         "method.estimator: unknown key (allowed: al"),
        ("method", {"name": "bdpl", "tau": 1}, "method.tau: is not a key of bdpl"),
        ("method", {"name": "adam"}, "method.name: 'adam' is not one of 'gs-bdpl', 'bdpl'"),
    ],
)  # fmt: skip
def test_one_line_names_key_and_reason(path: str, value: object, line: str) -> None:
    (problem,) = problems(edited(path, value))
    assert problem.startswith(line), problem


SLOTS = [{"name": "labels", "candidates": {"kind": "labels", "sets": 5}}, {"name": "a"}]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"task": {"template": "{prompt} {mask}", "labels": {"list": 5}}},
         ["task.labels.list: input should be a valid string"]),
        ({"task": {"template": "{prompt} {mask}", "labels": {0.5: " a", "b": " b"}}},
         ["task.labels.0.5: input should be a valid string (got 0.5)"]),
        ({"task": {"template": "{prompt} {mask}", "labels": {n: f" w{n}" for n in range(65)}}},
         # The second form is that of pydantic 2.12.
         [("task.labels: mapping should have at most 64 items, not more (got {0: ' w0'",
           "task.labels: value should have at most 64 items, not 65 (got {0: ' w0'")]),
        ({"prompt": {"slots": SLOTS}},
         ["prompt.slots.0.candidates.sets: input", "prompt.slots.1.candidates: is required"]),
        ({"prompt": {"slots": [{"name": "a", "candidates": {"kind": "pmi", "pmi": 3}}]}},
         ["prompt.slots.0.candidates.pmi: unknown key (allowed: blank, kind, size)"]),
        ({"prompt": {"slots": [{"name": "a", "candidates": ["x", 5]}]}},
         ["prompt.slots.0.candidates.1: input should be a valid string (got 5)"]),
        ({"prompt": {"slots": [{"name": "labels", "candidates": [5, [" a", 3]]}]}},
         ["prompt.slots.0.candidates.0: input should be a valid dictionary (got 5) or input should",
          "prompt.slots.0.candidates.1.1: input should be a valid string (got 3)"]),
        ({"task": {"chat": {"user": "{a}{text}"}}, "prompt": 5},
         ["prompt: must be a mapping of keys (got 5)"]),
        ({"task": {"chat": {"user": "{a}{text}"}}, "prompt": {"slots": [5]}},
         ["prompt.slots: must be a list of mappings"]),
        ({"prompt": {"slots": [{"name": "a", "candidates": {}}]}},
         ["prompt.slots.0.candidates.kind: is required"]),
        ({"backend": {"kind": "onnx", "device": "cuda"}},
         ["backend.device: is not a key of kind onnx (allowed: cache, kind, model, threads)"]),
        ({"backend": {"kind": "openai", "model": "m", "retry": {"attempts": 0}}},
         ["backend.retry.attempts: input should be greater"]),
        ({"method": {"name": "own", "object": "a:b", "options": {"own": {1}}}},
         ["method.options.own: input was not a valid JSON value"]),
        ({"onnx": 1}, ["onnx: unknown key (allowed: backend, "]),
        ({"method": {"name": "random"}, "participation": {"exchange": "alpha"}},
         ["participation.exchange: "]),
        ({"method": {"name": "random", "local_steps": 2},
          "participation": {"exchange": "losses", "clients_per_round": 2}},
         ["participation.clients_per_round: "]),
        ({"method": {"name": "random", "num_samples": 6, "halving": 1}, "rounds": 8},
         ["method.halving: "]),
        ({"defence": "strict"}, ["defence: "]),
        ({"defence": {"outliers": 2}}, ["defence.outliers: needs kind standard"]),
        ({"defence": {"trust_region": 0}}, ["defence.trust_region: unknown key"]),
        ({"defence": "standard", "participation": {"selection": "proportional"}},
         ["participation.selection: must be uniform"]),
        ({"defence": "standard",
          "participation": {"clients_per_round": 2, "aggregation": "examples"}},
         ["participation.aggregation: must be plain"]),
        ({"privacy": {"target": "alpha", "clip": 1, "noise_multiplier": 1},
          "participation": {"exchange": "losses"}}, ["privacy.target: must be losses"]),
    ],
)  # fmt: skip
def test_a_line_has_the_whole_key(
    change: dict[str, Any], lines: list[str | tuple[str, str]]
) -> None:
    """Only members of unions are left out, also where a key has the name of a member."""
    found = problems({**SMALL, **change})
    for line, expected in zip(found, lines, strict=True):
        assert line.startswith(expected), line


CALIBRATED = {
    **SMALL,
    "method": {"name": "random"},
    "participation": {"exchange": "losses"},
    "calibration": "labels",
}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "labels"),
        ({"method": {"name": "gs-bdpl"}}, "none"),
        ({"privacy": {"clip": 2.0, "noise_multiplier": 1.0}}, "labels"),
        ({"task": {"template": "{prompt} {text} {mask}",
                   "labels": {str(n): f" w{n}" for n in range(64)}}}, "labels"),
        ({"task": {"template": "{prompt} {text}", "loss": "nll"}}, "none"),
    ],
)  # fmt: skip
def test_calibration_where_it_can_be_had(change: dict[str, Any], kind: str) -> None:
    spec = validate_spec(RunSpec, {**CALIBRATED, "calibration": "auto", **change}, source="x")
    assert spec.calibration.kind == kind
    # What was found is written down, and read again.
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
    unsaid = {name: value for name, value in CALIBRATED.items() if name != "calibration"}
    assert validate_spec(RunSpec, {**unsaid, **change}, source="x") == spec


FIVE = {"template": "{prompt} {text} {mask}", "labels": {str(n): f" w{n}" for n in range(5)}}
NLL = {"template": "{prompt} {text}", "loss": "nll"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"calibration": "label"}, "calibration: input should be 'auto', 'none' or 'labels'"),
        ({"calibration": {"kind": "labels", "size": 3}}, "calibration.size: unknown key (allowed"),
        ({"task": {**FIVE, "labels": {0: " a", 1: " b"}, "loss": "hinge"}},
         "calibration: labels needs task.loss cross_entropy, not "),
        ({"task": NLL}, "calibration: labels needs a task with label words"),
        ({"task": {**FIVE, "bias": [0, 0, 0, 0, 1]}},
         "calibration: labels needs a task without a bias"),
        ({"method": {"name": "gs-bdpl"}},
         "calibration: labels needs method thompson, random or tpe, not gs-bdpl"),
    ],
)  # fmt: skip
def test_calibrations_that_cannot_be(change: dict[str, Any], line: str) -> None:
    (problem,) = problems({**CALIBRATED, **change})
    assert problem.startswith(line), problem


WORDS = {"kind": "list", "candidates": ["", "a", "b"]}


def test_a_warm_start_from_a_text_or_weights() -> None:
    def warm_start(start: object, **more: object) -> object:
        prompt = {"length": 2, "vocabulary": WORDS, "start": start, **more}
        found = validate_spec(RunSpec, {**SMALL, "prompt": prompt}, source="x").prompt
        assert found == RunSpec.model_validate({**SMALL, "prompt": found.model_dump()}).prompt
        vocabulary = build_vocabulary(found.vocabulary, (), wanted=found.start_tokens)
        assert vocabulary.candidates[:3] == ("", "a", "b")
        return found.warm_start(vocabulary)

    assert warm_start(None) is None
    assert warm_start("Say:") == (((3, 0.5),), ((0, 0.5),))
    assert warm_start("b") == (((2, 0.5),), ((0, 0.5),))
    assert warm_start([{"a": 0.25, "b": 0.75}]) == (((1, 0.25), (2, 0.75)), ((0, 0.5),))
    assert warm_start([{"a": 0.2}, {"b": 1.0}]) == (((1, 0.2),), ((2, 1.0),))


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ({"vocabulary": SMALL["prompt"]["vocabulary"], "start": "Say:"},
         "prompt.start: has 1 of 2 positions; it must have all, because the vocabulary"),
        ({"vocabulary": WORDS, "start": [{"a": 1}, {"a": 1}, {"a": 1}]},
         "prompt.start: has 3 positions, but the prompt has 2"),
        ({"vocabulary": WORDS, "start": [{"a": 0.7, "b": 0.4}]},
         "prompt.start: the probabilities of position 0 exceed 1"),
        ({"vocabulary": WORDS, "start": [{"a": 0}]}, "prompt.start.0.a: input should be greater"),
        ({"vocabulary": WORDS, "start": []}, "prompt.start: "),
        ({"vocabulary": None}, "prompt.vocabulary: is required without slots"),
    ],
)  # fmt: skip
def test_no_initial_state(prompt: dict[str, Any], line: str) -> None:
    found = problems({**SMALL, "prompt": {"length": 2, **prompt}})
    assert found[0].startswith(line), found


def test_all_mistakes_at_once() -> None:
    document = {"name": "a b", "rounds": 0, "prompt": SMALL["prompt"]}
    found = problems(document)
    assert [problem.split(":")[0] for problem in found] == ["name", "task", "rounds"]
    assert "task: is required" in found


def test_more_clients_a_round_than_there_are() -> None:
    document = edited("data", {"train": "a.jsonl", "num_clients": 3})
    document["participation"] = {"clients_per_round": 4}
    (problem,) = problems(document)
    assert "clients_per_round: 4 is more than data.num_clients (3)" in problem
    # With replacement a client may hold several seats.
    document["participation"]["selection"] = "proportional"
    validate_spec(RunSpec, document, source="x")


@pytest.mark.parametrize("document", [None, [], "sst2", 3])
def test_no_mapping(document: object) -> None:
    assert problems(document)


AB = {"x": 1, "y": 2}


class TestYaml:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"a: [s3-cret", "is not YAML"),
            (b"a: *s3-cret", "is not YAML: found undefined alias in"),
            (b"a: !s3-cret's x", "is not YAML: could not determine a constructor for the tag in"),
            (b"a: 1\nb: 2\na: 3\n", "key 'a' is repeated in the block at line 1"),
            (b"a: {b: 1, b: 2}\n", "key 'b' is repeated"),
            (b"a: \xff\n", "is not UTF-8 text"),
            (b"a: !!python/object/apply:os.system [true]\n", "is not YAML"),
            (b"[" * 20_000, "is not YAML: it is nested too deeply"),
            (b"- " * 20_000, "is not YAML: it is nested too deeply"),
            (b"a: " + b"{b: " * 20_000, "is not YAML: it is nested too deeply"),
            (b"a: 1\nb: " + b"9" * 200_000, "is not YAML: line 2 has a number of 200000 digits"),
            (b"a: 0x" + b"f" * 9_998, "line 1 has a number of 10000 digits"),
            (b"a: 1\n<<: 3\n", "is not YAML: while constructing a mapping"),
            (b"<<: {a: 1}\na: 2\na: 3\n", "key 'a' is repeated"),
            (b'a: "\\UFFFFFFFF"', "is not YAML"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, content: bytes, reason: str) -> None:
        path = tmp_path / "RUN.yaml"
        path.write_bytes(content)
        with pytest.raises(SpecError) as excinfo:
            load_yaml(path)
        (problem,) = excinfo.value.problems
        assert reason in problem
        assert "s3-cret" not in problem
        assert str(excinfo.value).startswith(f"{path}: ")

    @pytest.mark.parametrize(
        "text",
        [
            "a: &a [*a]",
            "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]" for n in range(1, 12)),
            "\n".join(f"k{n}: 1" for n in range(5_000)),
        ],
        ids=["itself", "doubling", "keys"],
    )
    def test_documents_without_end(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "RUN.yaml"
        path.write_text(text)
        with pytest.raises(SpecError, match=f"^{path}: "):
            RunSpec.load(path)

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("{NO: [yes, off], true: False}", {"NO": ["yes", "off"], True: False}),
            ("[010, -08, 1_000, 12:30, 1:30.5]", ["010", "-08", "1_000", "12:30", "1:30.5"]),
            ("{2026-01-31: =, 1e3: ~}", {"2026-01-31": "=", "1e3": None}),
            ("[0, -7, +5, 0x1F, 0.5, .5, 5., 3.0e-4]", [0, -7, 5, 31, 0.5, 0.5, 5, 3e-4]),
            ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", {"a": AB, "b": {**AB, "y": 3}}),
            ("{<<: [{a: 1}, {a: 2, b: 2}], c: 3}", {"a": 1, "b": 2, "c": 3}),
        ],
    )
    def test_scalars_and_merged_mappings(self, tmp_path: Path, text: str, found: object) -> None:
        """A form that only YAML 1.1 knows is text: it may be the name of a label."""
        path = tmp_path / "RUN.yaml"
        path.write_text(text)
        assert load_yaml(path) == found

    @pytest.mark.parametrize(("seed", "number"), [("010", 10), ("'7'", 7), ("0x10", 16)])
    def test_seeds(self, tmp_path: Path, seed: str, number: int) -> None:
        path = tmp_path / "RUN.yaml"
        path.write_text(RUN_YAML.replace("seed: 0", f"seed: {seed}"))
        assert RunSpec.load(path).seed == number

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="cannot be read: No such file"):
            load_yaml(tmp_path / "nothing.yaml")


methods = st.fixed_dictionaries(
    {"name": st.just("gs-bdpl"), "num_samples": st.integers(2, 65536)},
    optional={"tau": st.floats(1e-3, 100), "optimizer": st.sampled_from(["sgd", "adamw"])},
) | st.fixed_dictionaries(
    {"name": st.just("bdpl")}, optional={"optimizer": st.sampled_from(["sgd", "adamw"])}
)


@given(
    method=methods,
    usd=st.none() | st.decimals("0", "1000000", places=6),
    seed=st.integers(0, 2**53 - 1),
)
def test_a_spec_comes_back_from_json(
    method: dict[str, Any], usd: Decimal | None, seed: int
) -> None:
    """What a store keeps of a run is its spec as JSON."""
    document = {**SMALL, "method": method, "seed": seed, "budget": {"queries": 3, "usd": usd}}
    spec = RunSpec.model_validate(document)
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "run-yaml.md"
MOST_KEYS = 120
DERIVED = {("TaskSpec", "slots")}
"""Set from `prompt.slots`, and not written by people."""


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def leaves() -> list[tuple[str, str]]:
    """Model and key of every leaf: each member of a union counts, a section once."""
    seen: dict[type[BaseModel], None] = {}
    ahead: list[type[BaseModel]] = [RunSpec]
    found = []
    while ahead:
        model = ahead.pop()
        if model in seen:
            continue
        seen[model] = None
        for name, field in model.model_fields.items():
            inner = list(models_in(field.annotation))
            ahead.extend(inner)
            if not inner and (model.__name__, name) not in DERIVED:
                found.append((model.__name__, name))
    return found


def test_a_run_has_few_keys() -> None:
    assert len(leaves()) <= MOST_KEYS, sorted(leaves())


def test_the_page_has_every_key() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [(model, key) for model, key in leaves() if not re.search(rf"\b{key}\b", text)]
    assert not missing
    assert len(text.splitlines()) <= 200
