from pathlib import Path

import pytest

from tests.attacks import Attack, all_attacks

_ALL = all_attacks()


@pytest.mark.parametrize("attack", _ALL, ids=[attack.name for attack in _ALL])
def test_attack_fails(attack: Attack, tmp_path: Path) -> None:
    assert attack(tmp_path)
