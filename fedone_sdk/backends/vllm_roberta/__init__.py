"""A plugin for vLLM that serves RoBERTa as a masked language model.

Stock vLLM loads ``RobertaForMaskedLM`` as an embedding model, without its head. Where this package
is installed beside vLLM and the server is started with ``--io-processor-plugin fedone_roberta``,
``POST /pooling`` answers the log-probabilities of label tokens at the mask.

vLLM calls the two functions here, through entry points; nothing else of the SDK imports this
package, and this module imports neither vllm nor torch.
"""

from __future__ import annotations

__all__ = ["io_processor", "register"]

_ARCHITECTURE = "RobertaForMaskedLM"


def register() -> None:
    """Tells vLLM to load RoBERTa with its head (``vllm.general_plugins``, in every process)."""
    from vllm import ModelRegistry

    # vLLM imports "module:Class" when a model of this architecture is served, and not before: a
    # CUDA context made here would break its forked workers.
    ModelRegistry.register_model(_ARCHITECTURE, f"{__name__}._model:{_ARCHITECTURE}")


def io_processor() -> str:
    """Names the class that reads requests to ``/pooling`` (``vllm.io_processor_plugins``)."""
    return f"{__name__}._io_processor.MaskIOProcessor"
