"""Base of spec models: strict validation, YAML, and readable errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from fedone_sdk._values import Frozen
from fedone_sdk.errors import SpecError, needs_extra

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""Name of a run, in specs, messages and paths."""


class Spec(Frozen):
    """Base of all specs: immutable, without unknown keys."""


SpecT = TypeVar("SpecT", bound=BaseModel)

_SCALARS = {
    "bool": ("tTfF", r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": ("-+0123456789", r"[-+]?(?:0|[1-9][0-9]*)$|0x[0-9a-fA-F]+$"),
    "float": (
        "-+.0123456789",
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.inf)$|\.nan$",
    ),
}
"""By YAML type: its first characters and its forms, without those that only YAML 1.1 has."""


def validate_spec(model: type[SpecT], value: object, *, source: str) -> SpecT:
    """Validate a mapping, with readable errors.

    Raises:
        SpecError: One line per mistake: source, key, what is allowed.
    """
    try:
        valid = model.model_validate(value)
    except ValidationError as exc:
        raise SpecError(_merged(_problems(exc, model, value)), source=source) from None
    if numbers := [".".join(keys) for keys in _booleans(value, valid)]:
        problems = [f"{key}: must be a number, not true or false" for key in numbers]
        raise SpecError(problems, source=source)
    return valid


def _booleans(given: Any, valid: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys of booleans that pydantic has read as the numbers 0 and 1."""
    if isinstance(given, bool) and not isinstance(valid, bool):
        if isinstance(valid, int | float | Decimal):
            yield keys
    elif isinstance(given, Mapping):
        for key, one in given.items():
            inner = valid.get(key) if isinstance(valid, Mapping) else getattr(valid, str(key), None)
            yield from _booleans(one, inner, (*keys, str(key)))
    elif isinstance(given, list | tuple) and isinstance(valid, list | tuple):
        for number, pair in enumerate(zip(given, valid, strict=False)):
            yield from _booleans(*pair, (*keys, str(number)))


_MAX_DIGITS = 1000
"""Python prints no number of more than 4300."""


def load_yaml(path: str | Path) -> Any:
    """Read a YAML file; duplicate keys are an error.

    What only YAML 1.1 reads as something else is text, because it may name a label: ``yes`` and
    ``off``, ``010`` and ``12:30``, dates, and ``=``. A key ``<<`` merges other mappings.

    Raises:
        SpecError: The file is missing, not YAML, or nested too deeply.
        MissingExtraError: PyYAML is not installed.
    """
    with needs_extra("reading YAML", "cli"):
        import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = [key for key, _ in node.value if not key.tag.endswith(":merge")]
            keys = [self.construct_object(key, deep=True) for key in own]
            for key, count in Counter(key for key in keys if isinstance(key, Hashable)).items():
                if count > 1:
                    line = node.start_mark.line + 1
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} stands twice in the block at line {line}"
                    )
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [one for one in resolvers if one[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for name, (firsts, form) in _SCALARS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(form), list(firsts))

    def whole_number(loader: Loader, node: Any) -> int:
        if len(node.value) > _MAX_DIGITS:
            line = node.start_mark.line + 1
            raise ValueError(f"a number of {len(node.value)} digits in line {line}")
        return int(loader.construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", whole_number)
    try:
        text = Path(path).read_text(encoding="utf-8")
        return yaml.load(text, Loader)
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(path)) from exc
    except UnicodeDecodeError as exc:
        raise SpecError("is not UTF-8 text", source=str(path)) from exc
    except RecursionError as exc:
        raise SpecError("is not YAML: it is nested too deeply", source=str(path)) from exc
    except (yaml.YAMLError, ValueError, OverflowError) as exc:  # of numbers and dates, too
        raise SpecError(f"is not YAML: {' '.join(str(exc).split())}", source=str(path)) from exc


def _merged(problems: Iterator[tuple[str, str]]) -> list[str]:
    """Return the lines; a union's members, which fail together, give the deepest problem."""
    by_key: dict[str, dict[str, None]] = {}
    for key, message in problems:
        by_key.setdefault(key, {})[message] = None
    parents = {key[:at] for key in by_key for at, one in enumerate(key) if one == "."}
    return [
        f"{key}: {' or '.join(messages)}" if key else "; ".join(messages)
        for key, messages in by_key.items()
        if key not in parents
    ]


def _as_written(keys: Iterable[str | int], given: Any) -> Iterator[str]:
    """Leave out the keys that a short form does not have: a name, or a list."""
    for key in keys:
        secret = isinstance(given, Mapping) and given.keys() == {"env"}  # Stands for a text.
        listed = isinstance(given, list | tuple) and isinstance(key, str)
        if isinstance(given, str) or secret or listed:
            continue
        yield str(key)
        if isinstance(given, list | tuple):
            given = given[int(key)] if int(key) < len(given) else None
        else:
            given = given.get(key) if isinstance(given, Mapping) else None


def _problems(
    error: ValidationError, model: type[BaseModel], given: Any
) -> Iterator[tuple[str, str]]:
    for item in error.errors(include_url=False):
        place = _place(model.__pydantic_core_schema__, item["loc"], {})
        keys = item["loc"] if place is None else place.keys
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            allowed = "" if place is None else ", ".join(sorted(place.allowed))
            message = f"unknown key (allowed: {allowed})" if allowed else "unknown key"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] in ("union_tag_invalid", "union_tag_not_found"):
            context = item.get("ctx", {})
            message = "is required"
            if "tag" in context:
                message = f"{context['tag']!r} is not one of {context.get('expected_tags')}"
            keys = (*keys, str(context.get("discriminator")).strip("'"))
        written = [*_as_written(keys, given)]
        if item["type"] == "missing" and written[-1:] != [str(keys[-1])]:
            written.append(str(keys[-1]))  # A short form does not have it.
        key = ".".join(written)
        if item["type"] == "value_error":
            # A check of several keys names the one that is wrong.
            if key and (named := _KEY.match(message)):
                key, message = f"{key}.{named[1]}", message[named.end() :]
        elif item["type"] not in _OWN_WORDS:
            message = _PYTHON.sub("", message).replace("tuple", "list")
            message = f"{message[0].lower()}{message[1:]} (got {item['input']!r:.80})"
        yield key, message


_OWN_WORDS = ("extra_forbidden", "missing", "union_tag_invalid", "union_tag_not_found")
"""Types of mistakes that have their message above."""

_PYTHON = re.compile(r" or (instance of \w+|object to extract fields from)")
"""What pydantic accepts besides what a file can hold."""
_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)*): ")


class _Place(NamedTuple):
    """A location of pydantic in terms of the file.

    Attributes:
        keys: Its keys and indices, without the steps that only name the member of a union.
        allowed: The keys that are allowed instead of an unknown last one.
    """

    keys: tuple[str | int, ...] = ()
    allowed: frozenset[str] = frozenset()

    def below(self, step: str | int) -> _Place:
        """Return the place under a key."""
        return self._replace(keys=(step, *self.keys))


def _place(
    schema: Mapping[str, Any], location: tuple[str | int, ...], named: Mapping[str, Any]
) -> _Place | None:
    """Follow a location through pydantic's core schema; None if it does not fit."""
    if not location:
        return _Place()
    step, rest = location[0], location[1:]
    match schema["type"]:
        case "definitions":
            named = {one["ref"]: one for one in schema["definitions"]}
            return _place(schema["schema"], location, named)
        case "definition-ref":
            return _place(named[schema["schema_ref"]], location, named)
        case "tagged-union":
            return (
                _place(schema["choices"][step], rest, named) if step in schema["choices"] else None
            )
        case "union":
            choices = (one[0] if isinstance(one, tuple) else one for one in schema["choices"])
            places = (_place(choice, rest, named) for choice in choices)
            return next((one for one in places if one is not None), None)
        case "model-fields":
            if step not in schema["fields"]:
                return None if rest else _Place((step,), frozenset(schema["fields"]))
            below = schema["fields"][step]
        case "dict":
            if rest == ("[key]",):
                return _Place((step,))
            below = schema.get("values_schema", {"type": "any"})
        case "list" | "tuple":
            items = schema.get("items_schema", {"type": "any"})
            below = items[min(int(step), len(items) - 1)] if isinstance(items, list) else items
        case _:
            return _place(schema["schema"], location, named) if "schema" in schema else None
    found_below = _place(below, rest, named)
    return None if found_below is None else found_below.below(step)
