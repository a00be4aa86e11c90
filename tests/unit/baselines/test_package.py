from __future__ import annotations

from tests.interpreter import printed_by


def test_importing_it_loads_no_torch() -> None:
    """It may not be installed: the backend needs it, and fails when it is created."""
    code = (
        "import sys, fedone_sdk.baselines as b\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(b.PromptTuning.kind, b.PTuningV2.kind, b.FineTuning().max_epochs)"
    )
    assert printed_by(code) == "embeddings key_values 20"
