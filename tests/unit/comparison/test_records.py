from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from fedone_sdk.budget import Usage
from fedone_sdk.comparison import TrialFile
from fedone_sdk.errors import SpecError
from tests.unit.comparison.records import record


def test_records_come_back_to_the_last_digit(tmp_path: Path) -> None:
    file = TrialFile(tmp_path / "trials.jsonl")
    assert file.read() == []
    one = record(
        spent=Usage(requests=3, usd=Decimal("0.10000000000000000001")), prompt=" é\u2028\n"
    )
    two = record(seed=1, losses=[None, 0.1 + 0.2], predicted=[None, -1], targets=[0, 1])
    file.append(one)
    file.append(two)
    assert file.read() == [one, two]


@pytest.mark.parametrize("left", [b"{", b'{"entrant": "thompson"', b"\xff\x00"])
def test_a_line_that_was_cut_short_is_no_trial(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "trials.jsonl"
    file = TrialFile(path)
    file.append(record())
    with path.open("ab") as stream:
        stream.write(left)
    assert file.read() == [record()]
    file.append(record(seed=1))
    assert file.read() == [record(), record(seed=1)]


def test_an_invalid_line_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    TrialFile(path).append(record())
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(SpecError, match="line 1 is not a trial"):
        TrialFile(path).read()
