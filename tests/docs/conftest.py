"""The documentation, built once for all tests of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. What Sphinx warns of, broken links included, is an error."""
    folder = tmp_path_factory.mktemp("docs")
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", *strict, "--conf-dir", "docs"]
    command += ["--doctree-dir", str(folder / "doctrees"), ".", str(folder / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"
