"""Methods by name, and methods of a user's own, which RUN.yaml names.

Only a file or a program of this machine can load one (`load_method`). A run in a message or a
store names an object, and is refused unless that object was loaded here.
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
from .method import Algorithm, Candidates, ClassLosses, Holder
from .sampling import stream
from .searches import TPE, RandomSearch, ThompsonSampling
from .space import Space, Start
from .state import State, dump_state, load_state

if TYPE_CHECKING:
    from fedone_sdk.spec import MethodSpec, OwnMethodSpec, SearchSpec


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
    name: str, *, prompt_len: int, vocab_size: int, num_samples: int, seed: int, **options: Any
) -> Algorithm:
    """Return the black-box method called `name`.

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
    num_labels: int = 1,
    num_groups: int = 1,
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
        num_labels: Labels whose biases a pool method fits; 1 disables calibration.
        num_groups: Groups of examples that losses are reported for (`calibration.num_groups`).
        asks: The run's number of asks; successive halving takes the last of them. None disables it.
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
        halving = 0 if asks is None else math.floor(pool.halving * asks)
        options |= {
            "num_labels": num_labels,
            "num_groups": num_groups,
            "halving": halving,
            "search": None if asks is None or not halving else asks - halving,
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
    from pydantic import TypeAdapter

    from fedone_sdk.spec import MethodSpec

    spec = TypeAdapter[Any](MethodSpec).validate_python({"name": name})
    return {
        field.name: getattr(spec, field.name)
        for field in fields(_TYPES[name])
        if field.init and field.default is MISSING and field.name not in _COMMON
    }


def _fields(name: str) -> tuple[str, ...]:
    _checks.choice("method", name, METHODS)
    return tuple(field.name for field in fields(_TYPES[name]) if field.init)


_GROUP = "fedone.methods"
_NEEDED = ("prompt_len", "vocab_size", "num_samples")
_MEMBERS = (
    *("ask", "bias", "check", "finished", "init", "num_samples", "plain_bias", "project"),
    *("prompt", "search_on", "shape", "shares_memory", "tell", "wanted"),
)

_loaded: dict[str, Callable[..., Any]] = {}
"""Loaded objects by their name in RUN.yaml; per process, like modules."""


def load_method(spec: MethodSpec, folder: str | Path = ".") -> None:
    """Import the object that a run of this machine names as its method.

    The object is called with the spec's options, and with those of these arguments that its
    signature names: `prompt_len` (n), `vocab_size` (N), `num_samples` (I), `seed`, `blank` (the
    index of the blank candidate, or None), `space` (`Space`, the candidates of each position),
    `asks` (how many asks the run has room for) and `start` (the warm start, or None). It returns
    an `Algorithm`; `PlainAlgorithm` is a base class.

    Args:
        spec: The method; nothing happens unless it is one of the user's own.
        folder: Where its module is looked for too: the folder of RUN.yaml.

    Raises:
        SpecError: The object cannot be imported.
    """
    if spec.name == "own" and spec.object is not None:
        _loaded[spec.object] = load_object("method.object", spec.object, folder, group=_GROUP)


def own_method(
    spec: OwnMethodSpec,
    *,
    prompt_len: int,
    vocab_size: int,
    blank: int | None,
    space: Space | None,
    seed: int,
    asks: int | None,
    start: Start | None,
) -> OwnAlgorithm:
    """Return the method of a user's own, checked once.

    Raises:
        SpecError: It was not loaded.
        ValueError: It does not keep to the protocol (`check_algorithm`).
    """
    make = None if spec.object is None else _loaded.get(spec.object)
    if make is None:
        raise SpecError(
            f"method.object: {spec.object!r} was not loaded here, and a stored run loads nothing; "
            "give the RUN.yaml that names it (--run RUN.yaml, or runs of a server's config)",
            source="run",
        )
    if space is None:
        space = Space.repeated(prompt_len, vocab_size, blank)
    given: dict[str, Any] = {
        "prompt_len": prompt_len,
        "vocab_size": vocab_size,
        "num_samples": spec.num_samples,
        "seed": seed,
        "blank": blank,
        "space": space,
        "asks": asks,
        "start": start,
    }
    taken = _taken(make, given)
    if start is not None and "start" not in taken:
        raise ValueError(f"object: {spec.object} takes no start, and prompt.start gives one")
    if min(space.sizes) < vocab_size and "space" not in taken:
        raise ValueError(
            f"object: {spec.object} takes no space, and the slots have different numbers of "
            "candidates"
        )
    try:
        method = make(**taken, **spec.options)
        check_algorithm(method, space=space, num_samples=spec.num_samples)
    except Exception as exc:  # The user's code can raise anything.
        known = isinstance(exc, MethodError)
        reason = f": {exc}" if known else f" raises {type(exc).__name__}: {exc}"
        raise ValueError(f"object: {spec.object}{reason}") from exc
    return OwnAlgorithm(method, name=str(spec.object), space=space)


def check_algorithm(method: Any, *, space: Space, num_samples: int) -> None:
    """Check that an object keeps to the protocol of `Algorithm`, by two asks and a tell.

    Its states must be storable and equal inputs must give equal results, since a server that is
    restarted and a resumed run compute them again.

    Raises:
        MethodError: It does not; the message says where.
    """
    missing = [name for name in _MEMBERS if not hasattr(method, name)]
    if missing:
        kind = type(method).__name__
        raise MethodError(f"makes a {kind} without {', '.join(missing)}; see PlainAlgorithm")
    _demand(method.num_samples == num_samples, f"num_samples: must be {num_samples}")
    _demand(tuple(method.shape) == space.shape, f"shape: must be {space.shape} (n, N)")
    state = _checked_state("init", method.init(), method, space)
    asked = _checked_prompts(method.ask(state, stream(0)), space, None)
    again = method.ask(load_state(dump_state(state)), stream(0))
    same = np.array_equal(asked.prompts, again.prompts)
    _demand(same, "ask: gives other prompts for the same state and generator")
    wanted = int(method.wanted(state))
    _demand(2 <= wanted <= num_samples, f"wanted: must lie in [2, {num_samples}], not {wanted}")
    losses = np.linspace(0.5, 1.5, len(asked.prompts))
    before = dump_state(state)
    after = _checked_state("tell", method.tell(state, asked, losses), method, space)
    _demand(dump_state(state) == before, "tell: changes the state that it is given")
    told_again = method.tell(load_state(before), asked, losses)
    _demand(dump_state(after) == dump_state(told_again), "tell: gives another state when repeated")
    _checked_prompts(method.ask(after, stream(1), 2), space, 2)


class OwnAlgorithm:
    """A method of a user's own, whose results are checked and whose errors are `MethodError`."""

    def __init__(self, method: Algorithm, *, name: str, space: Space) -> None:
        self._method = method
        self._name = name
        self._space = space

    @property
    def shape(self) -> tuple[int, int]:
        """Positions and candidates, (n, N)."""
        return self._space.shape

    @property
    def shares_memory(self) -> bool:
        """Whether the memory belongs to the run."""
        return bool(self._method.shares_memory)

    @property
    def num_samples(self) -> int:
        """I."""
        return self._method.num_samples

    def wanted(self, state: State) -> int:
        """Return the preferred number of prompts of the next ask."""
        with self._naming("wanted"):
            return int(self._method.wanted(state))

    def init(self) -> State:
        """Return the untrained state."""
        with self._naming("init"):
            return self._method.init()

    def check(self, state: State) -> None:
        """Raise `ValueError` unless the method can continue from a state."""
        if state.alpha.shape != self.shape:
            raise ValueError(f"alpha must be of shape {self.shape}, not {state.alpha.shape}")
        self._method.check(state)

    def project(self, alpha: ArrayLike) -> NDArray[np.float32]:
        """Return the nearest feasible `alpha`."""
        with self._naming("project"):
            return np.asarray(self._method.project(alpha), dtype=np.float32)

    def prompt(self, state: State) -> NDArray[np.int64]:
        """Return the prompt to deploy."""
        with self._naming("prompt"):
            return _checked_prompt(self._method.prompt(state), self._space)

    def bias(self, state: State) -> NDArray[np.float64] | None:
        """Return None: label biases are for the SDK's searches."""
        return None

    def plain_bias(self, state: State) -> NDArray[np.float64] | None:
        """Return None, likewise."""
        return None

    def finished(self, state: State) -> bool:
        """Return whether the method has converged."""
        with self._naming("finished"):
            return bool(self._method.finished(state))

    def search_on(self, state: State) -> State:
        """Return the state to continue from when more asks are planned."""
        with self._naming("search_on"):
            return self._method.search_on(state)

    def ask(
        self,
        state: State,
        rng: np.random.Generator,
        num_samples: int | None = None,
        holder: Holder | None = None,
    ) -> Candidates:
        """Return prompts to score; `holder` has no effect."""
        with self._naming("ask"):
            found = self._method.ask(state, rng, num_samples)
            return _checked_prompts(found, self._space, num_samples)

    def tell(self, state: State, candidates: Candidates, losses: ArrayLike | ClassLosses) -> State:
        """Return the next state."""
        with self._naming("tell"):
            after = self._method.tell(state, candidates, losses)
            return _sound_state("tell", after, self._space)

    @contextmanager
    def _naming(self, member: str) -> Iterator[None]:
        try:
            yield
        except MethodError as exc:
            raise MethodError(f"method {self._name}: {exc}") from exc
        except Exception as exc:  # The user's code can raise anything.
            reason = f"{type(exc).__name__}: {exc}"
            raise MethodError(f"method {self._name}: {member} raises {reason}") from exc


def _taken(make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # Written in C: it names nothing.
        return {name: given[name] for name in _NEEDED}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(given)
    return {each.name: given[each.name] for each in parameters if each.name in given}


def _demand(fulfilled: bool, problem: str) -> None:
    if not fulfilled:
        raise MethodError(problem)


def _sound_state(member: str, state: Any, space: Space) -> State:
    """Return a state that can be stored and shown."""
    _demand(isinstance(state, State), f"{member}: must return a State")
    found: State = state
    shape = found.alpha.shape
    _demand(shape == space.shape, f"{member}: alpha must be of shape {space.shape}, not {shape}")
    _demand(bool((found.alpha >= 0).all()), f"{member}: alpha must not be negative")
    return found


def _checked_state(member: str, state: Any, method: Algorithm, space: Space) -> State:
    """Return a state from which the method can continue."""
    found = _sound_state(member, state, space)
    # A server may be restarted after any round.
    method.check(load_state(dump_state(found)))
    feasible = np.array_equal(method.project(found.alpha), found.alpha)
    _demand(feasible, f"project: changes the alpha that {member} returned")
    _checked_prompt(method.prompt(found), space)
    return found


def _checked_prompt(prompt: Any, space: Space) -> NDArray[np.int64]:
    found = np.asarray(prompt)
    sound = np.issubdtype(found.dtype, np.integer) and found.shape == (space.prompt_len,)
    _demand(
        sound and space.holds(found[None]),
        f"prompt: must be {space.prompt_len} indices of candidates, not {found!r:.80}",
    )
    return found.astype(np.int64)


def _checked_prompts(found: Any, space: Space, num_samples: int | None) -> Candidates:
    _demand(isinstance(found, Candidates), "ask: must return Candidates")
    candidates: Candidates = found
    sound = candidates.prompts.shape[1] == space.prompt_len and space.holds(candidates.prompts)
    _demand(sound, "ask: returns prompts that are not of the run's candidates")
    count = len(candidates.prompts)
    enough = count == num_samples if num_samples is not None else count >= 2
    _demand(enough, f"ask: returns {count} prompts, not {num_samples or 'at least 2'}")
    return candidates
