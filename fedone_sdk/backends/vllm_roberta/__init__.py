"""A plugin for vLLM that serves RoBERTa as a masked language model.

Stock vLLM loads ``RobertaForMaskedLM`` as an embedding model, without its head. If this package is
installed in vLLM's environment and the server runs with ``--io-processor-plugin fedone_roberta``,
``POST /pooling`` returns the log-probabilities of label tokens at the mask.

vLLM calls the two functions here through entry points. No other module of the SDK imports this
package, and this module imports neither vllm nor torch.
"""

from __future__ import annotations

__all__ = ["io_processor", "register"]

_ARCHITECTURE = "RobertaForMaskedLM"


def register() -> None:
    """Register RoBERTa with its head (``vllm.general_plugins``, in every process)."""
    from vllm import ModelRegistry

    # vLLM imports "module:Class" only to serve a model of this architecture. An import
    # here would make a CUDA context, which breaks its forked workers.
    ModelRegistry.register_model(_ARCHITECTURE, f"{__name__}._model:{_ARCHITECTURE}")


def io_processor() -> str:
    """Class path of the parser of requests to ``/pooling`` (``vllm.io_processor_plugins``)."""
    return f"{__name__}._io_processor.MaskIOProcessor"
