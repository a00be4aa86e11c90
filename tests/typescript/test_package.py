"""The package: its tarball, React Native's bundler on it, and the TypeScript of its pages."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.pages import blocks

pytestmark = pytest.mark.typescript

BUNDLED = """\
import { EdgeClient } from "@fedone/edge";
import { burst } from "@fedone/edge/burst";
import { llamaRn } from "@fedone/edge/llama-rn";
import { edgeTask, secureStorage } from "@fedone/edge/react-native";
const storage = { get: () => undefined, set: () => undefined, remove: () => undefined };
const answer = { status: 418, ok: false, headers: new Headers(), text: async () => "" };
const fetch = async () => answer;
const options = { server: "https://fedone.example", token: "t", data: [{ text: "a", label: 1 }] };
const client = new EdgeClient({ ...options, storage, fetch });
burst(client, { seconds: 5 }).then((outcome) => console.log(outcome));
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_metro_bundles_the_tarball(models: Path, package: Path, tmp_path: Path) -> None:
    run("npm", "pack", "--silent", "--pack-destination", tmp_path, cwd=package)
    (tarball,) = tmp_path.glob("*.tgz")
    (tmp_path / "package.json").write_text('{"private": true}')
    run("npm", "install", "--silent", "--offline", tarball, cwd=tmp_path)
    installed = tmp_path / "node_modules" / "@fedone" / "edge"
    named = json.loads((installed / "package.json").read_text())["exports"].values()
    files = [installed / file for each in named for file in each.values()]
    wanted = [installed / "LICENSE", installed / "README.md", *files]
    assert [file for file in wanted if not file.is_file()] == []
    assert not installed.is_symlink()
    (tmp_path / "index.js").write_text(BUNDLED)
    metro = models / "node_modules" / ".bin" / "metro"
    options = ("--config", models / "metro.config.cjs", "--max-workers", "1", "--reset-cache")
    run(metro, "build", "index.js", "--out", "bundle.js", *options, cwd=tmp_path, APP=str(tmp_path))
    assert run("node", "bundle.js", cwd=tmp_path) == "offline\n"


ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / "guides" / "mobile.md",
    *sorted((ROOT / "examples" / "typescript_client").glob("*.md")),
    *sorted((ROOT / "examples" / "typescript_client" / "adapters").glob("*/*.md")),
]

# What a page leaves to the app.
APP = """\
import type * as edge from "@fedone/edge";
declare global {
  const server: string, token: string, leaving: AbortController, expired: AbortController;
  const data: edge.Example[], reviews: { all(): edge.Example[] };
  const progress: { show(kind: string): void };
  const battery: () => Promise<{ charging: boolean }>;
  const tokenFromYourBackend: () => Promise<string>;
  const schedule: (seconds: number) => void;
  const file: File, modelPath: string;
  const client: edge.EdgeClient;
  const model: { logProbs(texts: string[], words: readonly string[]): Promise<number[][]> };
}
"""
OPTIONS = {
    **{"module": "nodenext", "target": "es2022", "strict": True, "noEmit": True},
    **{"skipLibCheck": True, "types": ["node"], "lib": ["es2022", "dom"]},
    "noUncheckedSideEffectImports": False,
    "exactOptionalPropertyTypes": True,
}


def test_the_programs_compile(models: Path, package: Path) -> None:
    folder = package / "dist" / "pages"  # in the package, whose exports it then sees
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / "node_modules").symlink_to(models / "node_modules")  # the engines'
    (folder / "app.d.ts").write_text(APP)
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS}))
    count = 0
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "ts":
                count += 1
                name = f"{page.relative_to(ROOT).as_posix().replace('/', '-')}-{block.line}.ts"
                # With an import or an export a file is a module.
                (folder / name).write_text(f"{block.text}export {{}};\n", encoding="utf-8")
    assert count >= 7
    command = [package / "node_modules" / ".bin" / "tsc", "--project", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
