"""A plugin for vLLM that serves RoBERTa as a masked language model.

Stock vLLM loads ``RobertaForMaskedLM`` as an embedding model, without its head. With this package
in vLLM's environment and ``--io-processor-plugin fedone_roberta``, ``POST /pooling`` returns the
log-probabilities of label tokens at the mask. vLLM calls the functions here through entry points.
"""

from __future__ import annotations

__all__ = ["io_processor", "register"]

_ARCHITECTURE = "RobertaForMaskedLM"


def register() -> None:
    """Register RoBERTa with its head; called in each process of vLLM (``vllm.general_plugins``)."""
    from vllm import ModelRegistry

    # vLLM imports "module:Class" only to serve a model of this architecture. An import here would
    # make a CUDA context, which breaks vLLM's forked workers.
    ModelRegistry.register_model(_ARCHITECTURE, f"{__name__}._model:{_ARCHITECTURE}")


def io_processor() -> str:
    """Return the class path of the parser of requests to ``/pooling``."""
    return f"{__name__}._io_processor.MaskIOProcessor"
