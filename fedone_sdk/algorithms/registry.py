"""Methods by name."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from . import _checks
from .bdpl import BDPL
from .evolution import Evolution
from .gs_bdpl import GumbelSoftmaxBDPL
from .method import Algorithm

if TYPE_CHECKING:
    from fedone_sdk.spec import MethodSpec

__all__ = ["METHODS", "make_method", "method_from_spec", "method_options"]

_TYPES: dict[str, type[BDPL] | type[Evolution] | type[GumbelSoftmaxBDPL]] = {
    "bdpl": BDPL,
    "evolution": Evolution,
    "gs-bdpl": GumbelSoftmaxBDPL,
}
_COMMON = ("prompt_len", "vocab_size", "num_samples", "seed")

METHODS = tuple(_TYPES)


def method_options(name: str) -> tuple[str, ...]:
    """Return the options that the method called `name` takes beside the common ones."""
    _checks.choice("method", name, METHODS)
    return tuple(field.name for field in fields(_TYPES[name]) if field.name not in _COMMON)


def make_method(
    name: str, *, prompt_len: int, vocab_size: int, num_samples: int, seed: int, **options: Any
) -> Algorithm:
    """Return the method called `name`.

    Raises:
        ValueError: If the name, an option or a value is not one it takes.
    """
    _checks.known_options(f"method {name}", options, method_options(name))
    return _TYPES[name](
        prompt_len=prompt_len,
        vocab_size=vocab_size,
        num_samples=num_samples,
        seed=seed,
        **options,
    )


def method_from_spec(
    spec: MethodSpec, *, prompt_len: int, vocab_size: int, blank: int | None, seed: int = 0
) -> Algorithm:
    """Return the method that a RunSpec's ``method`` describes.

    Args:
        spec: The settings.
        prompt_len: n.
        vocab_size: N.
        blank: Index of the blank candidate, if the vocabulary has one.
        seed: The run's seed.

    Raises:
        ValueError: If its settings do not fit each other.
    """
    ours = {"name", "num_samples", "local_steps", "batch_size"}
    options = spec.model_dump(exclude=ours, exclude_none=True)
    if "blank" in method_options(spec.name):
        options["blank"] = blank
    return make_method(
        spec.name,
        prompt_len=prompt_len,
        vocab_size=vocab_size,
        num_samples=spec.num_samples,
        seed=seed,
        **options,
    )
