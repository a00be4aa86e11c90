"""Methods by name, and a user's own methods.

A user's method is imported (`load_method`) for a run that a RUN.yaml or a Python program on this
machine defines. A run from HTTP or a store is refused unless its method was loaded before.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedone_sdk.errors import MethodError, SpecError
from fedone_sdk.imports import load_object

from . import _checks
from .gradient import BDPL, GumbelSoftmaxBDPL
from .method import Algorithm, Candidates, ClassLosses, Holder, PlainAlgorithm
from .method_state import Ints, State, dump_state, load_state
from .sampling import stream
from .search_methods import TPE, RandomSearch, ThompsonSampling
from .space import Space, Start

if TYPE_CHECKING:
    from fedone_sdk.spec import MethodSpec, OwnMethodSpec, SearchSpec


_TYPES: dict[str, type[Any]] = {
    "bdpl": BDPL,
    "gs-bdpl": GumbelSoftmaxBDPL,
    "random": RandomSearch,
    "thompson": ThompsonSampling,
    "tpe": TPE,
}
_COMMON = ("space", "num_samples", "seed")

METHODS = tuple(_TYPES)


def method_options(name: str) -> tuple[str, ...]:
    """Return the options of a method besides `space`, `num_samples` and `seed`."""
    _checks.choice("method", name, METHODS)
    return tuple(
        field.name for field in fields(_TYPES[name]) if field.init and field.name not in _COMMON
    )


def make_method(
    name: str, *, space: Space, num_samples: int, seed: int, **options: Any
) -> Algorithm:
    """Return the method called `name`, with the defaults of RUN.yaml.

    Raises:
        ValueError: The name, an option or a value is invalid.
    """
    allowed = method_options(name)
    if unknown := sorted(options.keys() - {*allowed}):
        raise ValueError(f"method {name} takes {', '.join(allowed)}, not {', '.join(unknown)}")
    method: Algorithm = _TYPES[name](
        space=space, num_samples=num_samples, seed=seed, **{**_defaults(name), **options}
    )
    return method


def method_from_spec(
    spec: MethodSpec,
    space: Space,
    *,
    seed: int = 0,
    num_labels: int = 1,
    num_groups: int = 1,
    asks: int | None = None,
    start: Start | None = None,
) -> Algorithm:
    """Return the method that the section ``method`` of RUN.yaml describes.

    Args:
        spec: The section.
        space: The prompts of the run.
        seed: The run's seed.
        num_labels: Number of labels whose biases a search fits; with 1 it fits none.
        num_groups: Number of groups of examples with separate losses (`losses.num_groups`).
        asks: The number of asks that the run plans. A search uses the last of them for successive
            halving. None disables the halving.
        start: The warm start of the search (`warm_start`).

    Raises:
        SpecError: A user's method was not loaded (`load_method`).
        ValueError: The settings do not fit each other.
    """
    if spec.name == "own":
        return own_method(spec, space, seed=seed, asks=asks, start=start)
    allowed = method_options(spec.name)
    options = spec.model_dump(include={*allowed}, exclude={"halving"}, exclude_none=True)
    if spec.pools:
        halving = 0 if asks is None else math.floor(cast("SearchSpec", spec).halving * asks)
        options |= {
            "num_labels": num_labels,
            "num_groups": num_groups,
            "halving": halving,
            "search": None if asks is None or not halving else asks - halving,
        }
    return make_method(
        spec.name, space=space, num_samples=spec.num_samples, seed=seed, start=start, **options
    )


@cache
def _defaults(name: str) -> Mapping[str, Any]:
    """Return the defaults of RUN.yaml for the options without a default in the class."""
    from pydantic import TypeAdapter

    from fedone_sdk.spec import MethodSpec

    spec = TypeAdapter[Any](MethodSpec).validate_python({"name": name})
    return {
        field.name: getattr(spec, field.name)
        for field in fields(_TYPES[name])
        if field.init and field.default is MISSING and field.name not in _COMMON
    }


_GROUP = "fedone.methods"
_NEEDED = ("prompt_len", "vocab_size", "num_samples")
_MEMBERS = sorted(name for name in vars(Algorithm) if not name.startswith("_"))

_loaded: dict[str, Callable[..., Any]] = {}
"""Loaded objects by their name in RUN.yaml."""


def load_method(spec: MethodSpec, folder: str | Path = ".") -> None:
    """Import the object that ``method.object`` of RUN.yaml names; do nothing for other methods.

    A run calls the object, which must return an `Algorithm` (`PlainAlgorithm` is a base class). The
    arguments are the spec's options, and each of these that the object's signature names:

    - `prompt_len` (n), `vocab_size` (N), `num_samples` (I) and `seed`;
    - `blank`, the index of the blank candidate, and `space`, the candidates of each position;
    - `asks`, the number of asks that the run plans, and `start`, the warm start.

    Args:
        spec: The method.
        folder: The folder of RUN.yaml, in which the module may be.

    Raises:
        SpecError: The object cannot be imported.
    """
    if spec.name == "own" and spec.object is not None:
        _loaded[spec.object] = load_object("method.object", spec.object, folder, group=_GROUP)


def own_method(
    spec: OwnMethodSpec, space: Space, *, seed: int, asks: int | None, start: Start | None
) -> OwnAlgorithm:
    """Create and check a user's method.

    Raises:
        SpecError: The method was not loaded.
        ValueError: The method violates the protocol (`check_algorithm`).
    """
    make = None if spec.object is None else _loaded.get(spec.object)
    if make is None:
        raise SpecError(
            f"method.object: {spec.object!r} was not loaded here. To load it, pass the "
            "RUN.yaml that names it (--run RUN.yaml, or the key runs of a server's config)",
            source="run",
        )
    available: dict[str, Any] = {
        "prompt_len": space.prompt_len,
        "vocab_size": space.vocab_size,
        "num_samples": spec.num_samples,
        "seed": seed,
        "blank": space.blanks[0] if len(space.layout) == 1 else None,
        "space": space,
        "asks": asks,
        "start": start,
    }
    arguments = _accepted(make, available)
    if start is not None and "start" not in arguments:
        raise ValueError(f"object: {spec.object} takes no argument start, but prompt.start is set")
    if min(space.sizes) < space.vocab_size and "space" not in arguments:
        raise ValueError(
            f"object: {spec.object} takes no argument space, but the slots have different numbers "
            "of candidates"
        )
    try:
        method = make(**arguments, **spec.options)
        check_algorithm(method, space=space, num_samples=spec.num_samples)
    except Exception as exc:  # The user's code can raise anything.
        reason = f": {exc}" if isinstance(exc, MethodError) else f" raises {_described(exc)}"
        raise ValueError(f"object: {spec.object}{reason}") from exc
    return OwnAlgorithm(method, name=str(spec.object), space=space)


def check_algorithm(method: Any, *, space: Space, num_samples: int) -> None:
    """Check that an object implements the protocol `Algorithm`, by calling its members.

    The states must be storable. Equal inputs must give equal results, because a restarted server
    repeats calls.

    Raises:
        MethodError: The object violates the protocol; the message names the member.
    """
    missing = [name for name in _MEMBERS if not hasattr(method, name)]
    if missing:
        kind = type(method).__name__
        raise MethodError(f"returns a {kind} without {', '.join(missing)}; see PlainAlgorithm")
    _require(method.num_samples == num_samples, f"num_samples: must be {num_samples}")
    _require(tuple(method.shape) == space.shape, f"shape: must be {space.shape} (n, N)")
    state = _resumable_state("init", method.init(), method, space)
    candidates = _valid_candidates(method.ask(state, stream(0)), space, None)
    again = method.ask(load_state(dump_state(state)), stream(0))
    same = np.array_equal(candidates.prompts, again.prompts)
    _require(same, "ask: gives other prompts for the same state and generator")
    wanted = int(method.wanted(state))
    _require(2 <= wanted <= num_samples, f"wanted: must lie in [2, {num_samples}], not {wanted}")
    losses = np.linspace(0.5, 1.5, len(candidates.prompts))
    before = dump_state(state)
    after = _resumable_state("tell", method.tell(state, candidates, losses), method, space)
    _require(dump_state(state) == before, "tell: changes the state that it is given")
    repeated = method.tell(load_state(before), candidates, losses)
    _require(dump_state(after) == dump_state(repeated), "tell: gives another state when repeated")
    _valid_candidates(method.ask(after, stream(1), 2), space, 2)


class OwnAlgorithm(PlainAlgorithm):
    """A user's method. Its results are checked, and its exceptions become `MethodError`.

    Only the SDK's own searches fit label biases.
    """

    def __init__(self, method: Algorithm, *, name: str, space: Space) -> None:
        self._method = method
        self._name = name
        self._space = space
        self.num_samples = method.num_samples

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of positions and of candidates, (n, N)."""
        return self._space.shape

    @property
    def shares_memory(self) -> bool:
        """Whether all clients share one memory; False if each client has its own."""
        return bool(self._method.shares_memory)

    def wanted(self, state: State) -> int:
        """Return the preferred number of prompts of the next ask."""
        with self._errors_of("wanted"):
            return int(self._method.wanted(state))

    def init(self) -> State:
        """Return the untrained state."""
        with self._errors_of("init"):
            return self._method.init()

    def check(self, state: State) -> None:
        """Raise `ValueError` unless the method can continue from a state."""
        super().check(state)
        self._method.check(state)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest feasible `alpha`."""
        with self._errors_of("project"):
            return np.asarray(self._method.project(alpha), dtype=np.float32)

    def prompt(self, state: State) -> Ints:
        """Return the prompt to deploy."""
        with self._errors_of("prompt"):
            return _valid_prompt(self._method.prompt(state), self._space)

    def finished(self, state: State) -> bool:
        """Return whether the method has converged."""
        with self._errors_of("finished"):
            return bool(self._method.finished(state))

    def search_on(self, state: State) -> State:
        """Return the state from which the search continues after a cap was raised."""
        with self._errors_of("search_on"):
            return self._method.search_on(state)

    def ask(
        self,
        state: State,
        rng: np.random.Generator,
        num_samples: int | None = None,
        holder: Holder | None = None,
    ) -> Candidates:
        """Return prompts to score; `holder` has no effect."""
        with self._errors_of("ask"):
            candidates = self._method.ask(state, rng, num_samples)
            return _valid_candidates(candidates, self._space, num_samples)

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Return the next state."""
        with self._errors_of("tell"):
            return _valid_state("tell", self._method.tell(state, candidates, losses), self._space)

    @contextmanager
    def _errors_of(self, member: str) -> Iterator[None]:
        try:
            yield
        except MethodError as exc:
            raise MethodError(f"method {self._name}: {exc}") from exc
        except Exception as exc:  # The user's code can raise anything.
            text = f"method {self._name}: {member} raises {_described(exc)}"
            raise MethodError(text) from exc


def _described(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


def _accepted(make: Callable[..., Any], available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a callable accepts by name."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # A callable written in C has no signature.
        return {name: available[name] for name in _NEEDED}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(available)
    return {each.name: available[each.name] for each in parameters if each.name in available}


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise MethodError(problem)


def _valid_state(member: str, state: Any, space: Space) -> State:
    """Check the type, the shape and the sign of a state."""
    _require(isinstance(state, State), f"{member}: must return a State")
    valid: State = state
    shape = valid.alpha.shape
    _require(shape == space.shape, f"{member}: alpha must be of shape {space.shape}, not {shape}")
    _require(bool((valid.alpha >= 0).all()), f"{member}: alpha must not be negative")
    return valid


def _resumable_state(member: str, state: Any, method: Algorithm, space: Space) -> State:
    """Check that the method can continue from a state, as after a restart of the server."""
    valid = _valid_state(member, state, space)
    method.check(load_state(dump_state(valid)))
    feasible = np.array_equal(method.project(valid.alpha), valid.alpha)
    _require(feasible, f"project: changes the alpha that {member} returned")
    _valid_prompt(method.prompt(valid), space)
    return valid


def _valid_prompt(prompt: Any, space: Space) -> Ints:
    indices = np.asarray(prompt)
    valid = np.issubdtype(indices.dtype, np.integer) and indices.shape == (space.prompt_len,)
    _require(
        valid and space.holds(indices[None]),
        f"prompt: must be {space.prompt_len} indices of candidates, not {indices!r:.80}",
    )
    return indices.astype(np.int64)


def _valid_candidates(candidates: Any, space: Space, num_samples: int | None) -> Candidates:
    _require(isinstance(candidates, Candidates), "ask: must return Candidates")
    valid: Candidates = candidates
    prompts = valid.prompts
    fit = prompts.shape[1] == space.prompt_len and space.holds(prompts)
    _require(fit, "ask: returns indices of candidates that do not exist")
    count = len(prompts)
    enough = count == num_samples if num_samples is not None else count >= 2
    _require(enough, f"ask: returns {count} prompts, not {num_samples or 'at least 2'}")
    return valid
