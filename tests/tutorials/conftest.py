"""Fixtures of the tutorials."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Where the tests are a background job, the shell had it ignored, for what we start too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
