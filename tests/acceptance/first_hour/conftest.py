"""Processes in a folder of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.first_hour.desk import ADMIN, ENROLMENT
from tests.acceptance.processes import Start, starting


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `fedone` and programs in ``tmp_path``, with the tokens that the users have."""
    tokens = {"FEDONE_TOKEN": ENROLMENT, "FEDONE_ENROLMENT": ENROLMENT, "FEDONE_ADMIN_TOKEN": ADMIN}
    with starting(tmp_path, **tokens) as found:
        yield found
