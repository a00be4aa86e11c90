from pathlib import Path

import pytest

from tests.attacks import all_attacks, run_attack


@pytest.mark.parametrize("name", all_attacks())
def test_attack_fails(name: str, tmp_path: Path) -> None:
    assert run_attack(name, tmp_path)
