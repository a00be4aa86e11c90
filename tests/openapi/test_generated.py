"""Clients by the OpenAPI Generator from the document of devices; run by scripts/test-openapi."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from fedone_sdk.testing import LoopbackFederation, ScriptedBackend
from tests.edge import edge_client
from tests.runs import WORDS, run_spec

ROOT = Path(__file__).parents[2]
JARS = os.environ.get("FEDONE_OPENAPI_JARS", "")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not JARS, reason="scripts/test-openapi installs the generator"),
]

GENERATORS = {
    "kotlin": (
        *("-g", "kotlin", "--library", "jvm-retrofit2", "--additional-properties"),
        "serializationLibrary=kotlinx_serialization,generateOneOfAnyOfWrappers=true",
    ),
    "swift": ("-g", "swift6"),
    "dart": ("-g", "dart-dio"),
    "java": (
        *("-g", "java", "--library", "native", "--additional-properties"),
        "useJakartaEe=true,openApiNullable=false,useOneOfDiscriminatorLookup=true",
    ),
}
"""The arguments of each; docs/guides/mobile.md names them."""

# Of each language: an integer, a number, a list of objects, and a union of two members.
FORMS = {
    "kotlin": (
        r"val minibatchSeed: kotlin\.Long\b",
        r"val losses: kotlin\.collections\.List<kotlin\.Double>",
        r"val labels: kotlin\.collections\.List<Label>",
        r"class \w*Wrapper\(val value: LossesAssignment\) : Assignment",
    ),
    "swift": (
        r"var minibatchSeed: Int64\b",
        r"var losses: \[Double\]",
        r"var labels: \[Label\]",
        r"case \w+\(LossesAssignment\)",
    ),
    "dart": (
        r"int get minibatchSeed;",
        r"BuiltList<double> get losses;",
        r"BuiltList<Label>\? get labels;",
        r"r'losses': LossesAssignment,",
    ),
    "java": (
        r"private Long minibatchSeed;",
        r"private List<Double> losses\b",
        r"private List<Label> labels\b",
        r"public Assignment\(LossesAssignment o\)",
    ),
}
BUILT_IN = {"Array", "Data", "Date", "Error", "List", "Map", "Object", "Result", "Set", "String"}


def ran(*command: object) -> str:
    """What a command prints; an error if it fails."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources of each language."""
    folder = tmp_path_factory.mktemp("generated")
    document = ROOT / "docs" / "reference" / "device.openapi.json"
    for name, options in GENERATORS.items():
        parts = ("--global-property", "models,modelDocs=false,modelTests=false")
        printed = ran(
            *("java", "-cp", JARS, "org.openapitools.codegen.OpenAPIGenerator", "generate"),
            *("-i", document, "-o", folder / name, *options),
            *(() if name == "java" else parts),
        )
        assert "renamed" not in printed.lower()  # as a name that a language reserves is
    return folder


@pytest.mark.parametrize("name", GENERATORS)
def test_sources_hold_what_is_sent(name: str, generated: Path) -> None:
    suffix = {"kotlin": "kt"}.get(name, name)
    files = [file for file in (generated / name).rglob(f"*.{suffix}") if "test" not in file.parts]
    text = "\n".join(file.read_text() for file in files)
    for form in FORMS[name]:
        assert re.search(form, text), form
    assert not re.search(r"BigDecimal|\bnum get|: (kotlin\.)?(Int|Float)\??\b(?! = \d)", text)
    classes = set(re.findall(r"\b(?:class|struct|interface|enum) ([A-Z]\w*)", text))
    assert not classes & BUILT_IN
    union = next(
        text for file in files if file.stem.lower() == "assignment" and (text := file.read_text())
    )
    assert not re.search(r"(val|var|get|private \w+) (alpha|steps|prompts)\b", union)


async def test_java_device_runs_a_round(generated: Path, tmp_path: Path) -> None:
    """Its losses are those of the Python client on the same rows."""
    sources = (generated / "java" / "src" / "main").rglob("*.java")
    example = ROOT / "examples" / "java_client" / "Device.java"
    ran("javac", "-nowarn", "-d", tmp_path, "-cp", JARS, *sources, example)
    rows = [{"text": f"text {n}", "label": str(n % 2)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_spec(method={"batch_size": 3}, rounds=1)
    means = []
    for device in ("java", "python"):
        async with (
            asyncio.timeout(60),
            LoopbackFederation(run, WORDS, backend=ScriptedBackend()) as served,
        ):
            if device == "python":
                async with edge_client(served.url, token=served.token, data=rows) as client:
                    await client.run_forever()
            else:
                process = await asyncio.create_subprocess_exec(
                    *("java", "-cp", f"{tmp_path}:{JARS}", "Device", served.url, "rows.jsonl"),
                    cwd=tmp_path,
                    env={**os.environ, "FEDONE_TOKEN": served.token},
                )
                assert await process.wait() == 0
            result = served.run.result()
            assert (result.status, result.rounds) == ("completed", 1)
            means.append(result.history[0].mean_loss)
    assert means[0] == pytest.approx(means[1], rel=1e-12)
