"""The documentation, built once for all its tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. What Sphinx warns of, broken links included, is an error."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # Of all workers: a build writes to docs/reference/api as well.
    built = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            folder = tmp_path_factory.mktemp("docs")
            strict = ["--fail-on-warning", "--keep-going", "--quiet"]
            command = [sys.executable, "-m", "sphinx", *strict, "--conf-dir", "docs"]
            command += ["--doctree-dir", str(folder / "doctrees"), ".", str(folder / "site")]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            (folder / "site").rename(built)
    return built
