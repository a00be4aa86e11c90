from __future__ import annotations

import fedone_sdk.algorithms


def test_all_is_sorted_and_true() -> None:
    names = fedone_sdk.algorithms.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(fedone_sdk.algorithms, name) for name in names)
