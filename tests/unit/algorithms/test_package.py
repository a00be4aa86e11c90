from __future__ import annotations

import subprocess
import sys

import fedone_sdk.algorithms


def test_all_is_sorted_and_true() -> None:
    names = fedone_sdk.algorithms.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(fedone_sdk.algorithms, name) for name in names)


def test_imports_nothing_but_numpy() -> None:
    script = (
        "import sys, fedone_sdk.algorithms as a; "
        "sys.exit(any(m in sys.modules for m in "
        "('asyncio', 'aiohttp', 'openai', 'torch', 'structlog', 'pydantic')))"
    )
    assert (
        subprocess.run([sys.executable, "-W", "error", "-c", script], check=False).returncode == 0
    )
