"""The TypeScript of the documentation compiles with the built package."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.pages import blocks

pytestmark = pytest.mark.typescript

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
