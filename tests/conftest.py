"""Fixtures that tests of several folders share."""

import gc
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.postgres import database, postgres

__all__ = ["database", "postgres"]

if "PYTEST_XDIST_WORKER" in os.environ:
    # One NumPy thread per worker, before NumPy is imported: more would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("hypothesis") is not None:  # some extras are tested without it
    from hypothesis import settings

    # How long an example takes says more of the machine than of the code.
    settings.register_profile("fedone", deadline=None)
    settings.load_profile("fedone")


_SLOW = (
    *("acceptance", "browser", "deploy", "docs", "flower", "llama_cpp", "tutorials"),
    *("contract/test_postgres_store.py", "fuzz/test_server.py"),
)
"""Tests of processes, browsers, models and pages; scripts/test-slow runs them."""
_FAST = ("acceptance/test_cli_state.py", "docs/test_reference.py")
"""Exceptions: the promises that scripts/test checks too."""
_FIRST = ("docs/test_site.py", "tutorials")
"""Long files with few tests, that one worker would finish last. The other tests of the site wait
for the build in the first one."""


def pytest_collection(session: pytest.Session) -> None:
    """Collect with the garbage collector off: it would traverse all tests again and again."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt the collected tests from garbage collection, and make full collections rare."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tests by their place, and start with the longest files."""
    for item in items:
        if _place(item).startswith(_SLOW) and not _place(item).startswith(_FAST):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not _place(item).startswith(_FIRST))


def _place(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).as_posix()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Where the tests are a background job, the shell had it ignored, for what we start too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct; fetched where it is not here yet."""
    from fedone_sdk.backends.local_models import model_path
    from fedone_sdk.errors import FedOneError

    try:
        return model_path("smollm2-135m-instruct")
    except FedOneError:
        from fedone_sdk.cli.models import fetch

        try:
            return fetch("smollm2-135m-instruct")
        except FedOneError as exc:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"needs SmolLM2: {exc}")
