"""Conversion of a method's prompts to texts and soft prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.candidates import LabelsSource, forms_of, label_words, prompt_of
from fedone_sdk.errors import LabelWordError, SpecError, needs_extra
from fedone_sdk.soft_prompt import MAX_ELEMENTS, SoftPrompt
from fedone_sdk.spec import BbtSpec, MethodSpec, RunSpec
from fedone_sdk.task import TaskSpec, TextPrompt
from fedone_sdk.vocabulary import LABELS, Vocabulary

_log = structlog.get_logger(__name__)

Show = Callable[[Sequence[float]], TextPrompt | SoftPrompt]
"""Maps a prompt's numbers (indices, a latent vector or parameters) to its text or soft prompt."""


async def shown_by(
    method: MethodSpec,
    *,
    prompt_len: int,
    task: TaskSpec,
    vocabulary: Vocabulary,
    backend: LLMBackend,
) -> Show:
    """Return the function that converts a method's prompts for a model.

    Args:
        method: The method.
        prompt_len: n.
        task: The task of the prompts.
        vocabulary: Its candidates; empty for methods without candidates.
        backend: The model's backend.

    Raises:
        SpecError: The model does not support such prompts.
        BackendError: The model cannot be read.
        MissingExtraError: A soft prompt needs NumPy.
    """
    if method.domain == "tokens":
        return lambda row: prompt_of(task, vocabulary, [int(index) for index in row])
    with needs_extra("a soft prompt", "alpha"):
        import numpy as np

        from fedone_sdk.algorithms.projection import check_size, projected
    kind = "key_values" if method.name == "p-tuning-v2" else "embeddings"
    if kind not in backend.takes:
        raise SpecError(f"method: {method.name} needs a backend that takes {kind}")
    space = await backend.embedding_space()
    if isinstance(method, BbtSpec):
        bbt = method
        try:
            rows = check_size(prompt_len=prompt_len, size=space.size, dimension=bbt.intrinsic_dim)
            if rows > MAX_ELEMENTS:
                raise ValueError(f"a soft prompt of {rows} numbers is too large")
        except ValueError as exc:
            raise SpecError(f"prompt.length: {exc}") from exc

        def embeddings(row: Sequence[float]) -> SoftPrompt:
            vectors = projected(
                np.asarray(row, dtype=np.float32),
                prompt_len=prompt_len,
                size=space.size,
                bound=bbt.bound,
                scale=bbt.scale * space.std / bbt.sigma,
                seed=bbt.projection_seed,
            )
            return SoftPrompt.of("embeddings", vectors)

        return embeddings
    shape = method.shape(prompt_len, 0)
    # Keys may be narrower than embeddings; the model checks their width.
    if kind == "embeddings" and shape[1] != space.size:
        raise SpecError(f"method.hidden_size: is {shape[1]}, the model's is {space.size}")
    return lambda row: SoftPrompt.of(kind, np.asarray(row, dtype=np.float32).reshape(shape))


async def usable_vocabulary(
    backend: LLMBackend | None, spec: RunSpec, vocabulary: Vocabulary
) -> Vocabulary:
    """Drop built-in sets of label words that a model does not support.

    User-defined sets are kept; the run rejects invalid ones at its start.

    Args:
        backend: The model; None if clients have their own models.
        spec: The run.
        vocabulary: Its candidates.

    Raises:
        BackendError: The model cannot be read.
    """
    shipped = any(
        isinstance(source, LabelsSource) and not source.sets for _, source in spec.prompt.sources
    )
    if backend is None or not shipped:
        return vocabulary
    dropped = []
    for candidate in vocabulary.candidates_of(LABELS)[1:]:  # The first set is the task's.
        try:
            for form in forms_of(spec.task, vocabulary):
                await backend.check(label_words(candidate), form)
        except LabelWordError:
            dropped.append(candidate)
    if dropped:
        _log.info("label words dropped that the model does not take", sets=dropped)
    return vocabulary.without(LABELS, dropped)
