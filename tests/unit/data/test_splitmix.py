"""SplitMix64 against its published values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedone_sdk.data import SplitMix64


def test_published_values() -> None:
    generator = SplitMix64(1234567)
    assert [generator.next_u64() for _ in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("seed", [-1, 2**53])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be in"):
        SplitMix64(seed)


@given(st.integers(0, 2**53 - 1), st.integers(1, 2**40))
def test_below_is_in_range(seed: int, bound: int) -> None:
    assert 0 <= SplitMix64(seed).below(bound) < bound


@given(st.integers(0, 2**53 - 1), st.lists(st.text(max_size=2)), st.integers(0, 40))
def test_sample_begins_a_shuffle(seed: int, items: list[str], count: int) -> None:
    before = list(items)
    shuffled = SplitMix64(seed).shuffle(items)
    assert items == before
    assert sorted(shuffled) == sorted(items)
    assert SplitMix64(seed).sample(items, count) == shuffled[:count]
