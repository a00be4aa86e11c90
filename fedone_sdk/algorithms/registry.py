"""Methods by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from . import _checks
from .bdpl import BDPL
from .gs_bdpl import GumbelSoftmaxBDPL
from .method import Algorithm
from .own import own_method
from .random_search import RandomSearch
from .space import Space
from .start import Start
from .thompson import ThompsonSampling
from .tpe import TPE

if TYPE_CHECKING:
    from fedone_sdk.spec.methods import MethodSpec, SearchSpec

_TYPES: dict[str, type[Any]] = {
    "bdpl": BDPL,
    "gs-bdpl": GumbelSoftmaxBDPL,
    "random": RandomSearch,
    "thompson": ThompsonSampling,
    "tpe": TPE,
}
_COMMON = ("prompt_len", "vocab_size", "num_samples", "seed")

METHODS = tuple(_TYPES)


def method_options(name: str) -> tuple[str, ...]:
    """Return the options of the method called `name`, without the common ones."""
    return tuple(field for field in _fields(name) if field not in _COMMON)


def make_method(
    name: str,
    *,
    prompt_len: int,
    vocab_size: int,
    num_samples: int,
    seed: int,
    **options: Any,
) -> Algorithm:
    """Return the black-box method called `name`.

    Args:
        name: One of `METHODS`.
        prompt_len: n.
        vocab_size: N.
        num_samples: I.
        seed: The run's seed.
        options: The method's own options (`method_options`); the others default as in RUN.yaml.

    Raises:
        ValueError: The name, an option or a value is invalid.
    """
    _checks.known_options(f"method {name}", options, method_options(name))
    common: dict[str, Any] = {
        "prompt_len": prompt_len,
        "vocab_size": vocab_size,
        "num_samples": num_samples,
        "seed": seed,
    }
    known = _fields(name)
    given = {key: value for key, value in common.items() if key in known}
    method: Algorithm = _TYPES[name](**{**_defaults(name), **given, **options})
    return method


def method_from_spec(
    spec: MethodSpec,
    *,
    prompt_len: int,
    vocab_size: int,
    blank: int | None,
    space: Space | None = None,
    seed: int = 0,
    biases: Sequence[Sequence[float]] | None = None,
    asks: int | None = None,
    start: Start | None = None,
) -> Algorithm:
    """Return the method that a RunSpec's ``method`` describes.

    Args:
        spec: The settings.
        prompt_len: n.
        vocab_size: N.
        blank: Index of the blank candidate, if all positions share one.
        space: Which candidates each position has, if not all N.
        seed: The run's seed.
        biases: Label biases that losses are reported for, shape (G, C), for a pool method.
        asks: The run's number of asks, of which a race takes the last; None disables the race.
        start: The warm start of the search (`warm_start`).

    Raises:
        SpecError: A method of the user's own was not loaded (`load_method`).
        ValueError: The settings do not fit each other.
    """
    if spec.name == "own":
        return own_method(
            spec,
            prompt_len=prompt_len,
            vocab_size=vocab_size,
            blank=blank,
            space=space,
            seed=seed,
            asks=asks,
            start=start,
        )
    ours = {"name", "num_samples", "local_steps", "batch_size"}
    allowed = method_options(spec.name)
    options = spec.model_dump(exclude=ours, exclude_none=True)
    if "blank" in allowed:
        options["blank"] = blank
    if "space" in allowed:
        options["space"] = space
    if "start" in allowed:
        options["start"] = start
    if spec.pools:
        pool = cast("SearchSpec", spec)
        race = 0 if asks is None else math.floor(pool.race * asks)
        options |= {
            "biases": None if biases is None else tuple(map(tuple, biases)),
            "race": race,
            "search": None if asks is None or not race else asks - race,
        }
    return make_method(
        spec.name,
        prompt_len=prompt_len,
        vocab_size=vocab_size,
        num_samples=spec.num_samples,
        seed=seed,
        **{key: value for key, value in options.items() if key in allowed},
    )


@cache
def _defaults(name: str) -> Mapping[str, Any]:
    """Return the defaults that RUN.yaml gives to required options."""
    from pydantic import TypeAdapter

    from fedone_sdk.spec.methods import MethodSpec

    spec = TypeAdapter[Any](MethodSpec).validate_python({"name": name})
    return {
        field.name: getattr(spec, field.name)
        for field in fields(_TYPES[name])
        if field.init and field.default is MISSING and field.name not in _COMMON
    }


def _fields(name: str) -> tuple[str, ...]:
    _checks.choice("method", name, METHODS)
    return tuple(field.name for field in fields(_TYPES[name]) if field.init)
