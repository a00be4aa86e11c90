"""The package @fedone/edge, built by scripts/test-typescript."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser.conftest import chromium

__all__ = ["chromium", "models", "package"]


@pytest.fixture(scope="session")
def package() -> Path:
    """Its folder."""
    folder = Path(__file__).parents[2] / "examples" / "typescript_client"
    if not (folder / "dist" / "page" / "page.js").exists() and os.environ.get("CI") != "true":
        pytest.skip("examples/typescript_client is not built; scripts/test-typescript does it")
    return folder


@pytest.fixture(scope="session")
def models(package: Path) -> Path:
    """The folder of the engines."""
    folder = package / "models"
    if not (folder / "dist" / "page.js").exists() and os.environ.get("CI") != "true":
        pytest.skip("the engines are not built; scripts/test-typescript does it")
    return folder
