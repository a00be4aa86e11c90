"""The tarball of the package: what is in it, and React Native's bundler on it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.typescript

APP = """\
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
    (tmp_path / "index.js").write_text(APP)
    metro = models / "node_modules" / ".bin" / "metro"
    options = ("--config", models / "metro.config.cjs", "--max-workers", "1", "--reset-cache")
    run(metro, "build", "index.js", "--out", "bundle.js", *options, cwd=tmp_path, APP=str(tmp_path))
    assert run("node", "bundle.js", cwd=tmp_path) == "offline\n"
