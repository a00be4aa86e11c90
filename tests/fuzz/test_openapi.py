"""A short conformance test; ``python -m tests.fuzz.openapi`` is longer."""

from __future__ import annotations

import os

from tests.fuzz.openapi import conformance, serving


def test_every_answer_is_one_that_the_contract_names() -> None:
    examples = int(os.environ.get("FEDONE_FUZZ_EXAMPLES", "8"))
    with serving() as found:
        result = conformance(found, examples)
    assert not result.broken
    assert {status for _, status in result.answers} >= {200, 401, 404, 422}
    assert not [key for key in result.answers if key[1] >= 500]
