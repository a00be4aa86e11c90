"""The base class of RUN.yaml's sections, the YAML loader, and readable validation errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError

from fedone_sdk._values import Frozen
from fedone_sdk.errors import SpecError, needs_extra

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""Name of a run, in specs, messages and paths."""


class Spec(Frozen):
    """Base of all specs: immutable; unknown keys are an error."""


SpecT = TypeVar("SpecT", bound=BaseModel)

_SCALARS = {
    "bool": ("tTfF", r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": ("-+0123456789", r"[-+]?(?:0|[1-9][0-9]*)$|0x[0-9a-fA-F]+$"),
    "float": (
        "-+.0123456789",
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|\.inf)$|\.nan$",
    ),
}
"""For each YAML type, the first characters of its scalars and their pattern, as in YAML 1.2."""


def validate_spec(model: type[SpecT], value: object, *, source: str) -> SpecT:
    """Validate a mapping; `SpecError` has one line per mistake: source, key, what is allowed."""
    try:
        valid = model.model_validate(value)
    except ValidationError as exc:
        raise SpecError(_merged(_problems(exc, model, value)), source=source) from None
    if numbers := [".".join(keys) for keys in _booleans(value, valid)]:
        problems = [f"{key}: must be a number, not true or false" for key in numbers]
        raise SpecError(problems, source=source)
    return valid


def _booleans(value: Any, valid: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys of booleans that pydantic has read as the numbers 0 and 1."""
    if isinstance(value, bool) and not isinstance(valid, bool):
        if isinstance(valid, int | float | Decimal):
            yield keys
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            field = valid.get(key) if isinstance(valid, Mapping) else getattr(valid, str(key), None)
            yield from _booleans(inner, field, (*keys, str(key)))
    elif isinstance(value, list | tuple) and isinstance(valid, list | tuple):
        for number, pair in enumerate(zip(value, valid, strict=False)):
            yield from _booleans(*pair, (*keys, str(number)))


def check_kinds(source: str, **arguments: tuple[object, Any]) -> None:
    """Check the kind (a class or a union) of each argument; `SpecError` does not show values."""
    problems = []
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            kinds = [each.__name__ for each in get_args(kind) or (kind,) if each is not NoneType]
            allowed = " or ".join(kinds).replace("Callable", "a function")
            problems.append(f"{name}: is {type(value).__name__}; it must be {allowed}")
    if problems:
        raise SpecError(problems, source=source)


_MAX_DIGITS = 1000
"""Maximum digits of an integer; Python cannot print an integer of more than 4300 digits."""


def load_yaml(path: str | Path) -> Any:
    """Read a YAML file; duplicate keys are an error.

    ``yes``, ``off``, ``010``, ``12:30``, dates and ``=`` stay texts, because they may be labels;
    YAML 1.1 would convert them. A key ``<<`` merges other mappings.

    Raises:
        SpecError: The file is missing, not YAML, or nested too deeply.
        MissingExtraError: PyYAML is not installed.
    """
    with needs_extra("reading YAML", "cli"):
        import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            nodes = [key for key, _ in node.value if not key.tag.endswith(":merge")]
            keys = [self.construct_object(key, deep=True) for key in nodes]
            for key, count in Counter(key for key in keys if isinstance(key, Hashable)).items():
                if count > 1:
                    line = node.start_mark.line + 1
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is repeated in the block at line {line}"
                    )
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [pair for pair in resolvers if pair[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for name, (firsts, form) in _SCALARS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(form), list(firsts))

    def integer(loader: Loader, node: Any) -> int:
        if len(node.value) > _MAX_DIGITS:
            line = node.start_mark.line + 1
            raise ValueError(f"line {line} has a number of {len(node.value)} digits")
        return int(loader.construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", integer)
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, Loader)
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(path)) from exc
    except UnicodeDecodeError as exc:
        raise SpecError("is not UTF-8 text", source=str(path)) from exc
    except RecursionError as exc:
        raise SpecError("is not YAML: it is nested too deeply", source=str(path)) from exc
    except (yaml.YAMLError, ValueError, OverflowError) as exc:
        # The file may contain secrets. PyYAML quotes no lines of a stream, but these names.
        text = re.sub(r"(alias|anchor|handle|tag) (['\"]).*?\2", r"\1", " ".join(str(exc).split()))
        raise SpecError(f"is not YAML: {text}", source=str(path)) from exc


def _merged(problems: Iterator[tuple[str, str]]) -> list[str]:
    """Return one line per wrong key; omit a key whose value contains another wrong key.

    If a value may have several types, pydantic reports errors for each type. The innermost error
    probably belongs to the type that the user meant.
    """
    by_key: dict[str, dict[str, None]] = {}
    for key, message in problems:
        by_key.setdefault(key, {})[message] = None
    parents = {key[:at] for key in by_key for at, character in enumerate(key) if character == "."}
    return [
        f"{key}: {' or '.join(messages)}" if key else "; ".join(messages)
        for key, messages in by_key.items()
        if key not in parents
    ]


def _as_written(keys: Iterable[str | int], value: Any) -> Iterator[str]:
    """Yield `keys` as the file has them: the short form ``candidates: labels`` has no ``kind``."""
    for key in keys:
        # ``{env: NAME}`` stands for a text.
        is_secret = isinstance(value, Mapping) and value.keys() == {"env"}
        is_list = isinstance(value, list | tuple)
        if isinstance(value, str) or is_secret or (is_list and isinstance(key, str)):
            continue
        yield str(key)
        if is_list:
            value = value[int(key)] if int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None


def _problems(
    error: ValidationError, model: type[BaseModel], value: Any
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
        written = [*_as_written(keys, value)]
        if item["type"] == "missing" and written[-1:] != [str(keys[-1])]:
            written.append(str(keys[-1]))  # The missing key is not in the file.
        key = ".".join(written)
        if item["type"] == "value_error":
            # A validator that compares several keys begins its message with the wrong key.
            if key and (named := _KEY.match(message)):
                key, message = f"{key}.{named[1]}", message[named.end() :]
        elif item["type"] not in _OWN_MESSAGES:
            message = re.sub("(?i)tuple", "list", _PYTHON.sub("", message))
            message = message.replace("OrderedDict", "mapping")
            message = f"{message[0].lower()}{message[1:]} (got {item['input']!r:.80})"
        yield key, message


_OWN_MESSAGES = ("extra_forbidden", "missing", "union_tag_invalid", "union_tag_not_found")
"""Types of errors whose messages `_problems` writes; other messages are pydantic's."""

_PYTHON = re.compile(r" or (instance of \w+|object to extract fields from)| after validation")
"""Words on Python's types, which are removed from pydantic's messages."""
_KEY = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)*): ")


class _Place(NamedTuple):
    """The keys and indices that lead to a value; if the last key is unknown, the allowed keys."""

    keys: tuple[str | int, ...] = ()
    allowed: frozenset[str] = frozenset()


def _place(
    schema: Mapping[str, Any], location: tuple[str | int, ...], definitions: Mapping[str, Any]
) -> _Place | None:
    """Return the place of an error, without pydantic's names of types; None if there is none."""
    if not location:
        return _Place()
    step, rest = location[0], location[1:]
    match schema["type"]:
        case "definitions":
            definitions = {each["ref"]: each for each in schema["definitions"]}
            return _place(schema["schema"], location, definitions)
        case "definition-ref":
            return _place(definitions[schema["schema_ref"]], location, definitions)
        case "tagged-union":
            member = schema["choices"].get(step)
            return None if member is None else _place(member, rest, definitions)
        case "union":
            choices = (c[0] if isinstance(c, tuple) else c for c in schema["choices"])
            places = (_place(choice, rest, definitions) for choice in choices)
            return next((place for place in places if place is not None), None)
        case "model-fields":
            if step not in schema["fields"]:
                return None if rest else _Place((step,), frozenset(schema["fields"]))
            below = schema["fields"][step]
        case "dict" | "ordered-dict":
            if rest == ("[key]",):
                return _Place((step,))
            below = schema.get("values_schema", {"type": "any"})
        case "list" | "tuple":
            items = schema.get("items_schema", {"type": "any"})
            below = items[min(int(step), len(items) - 1)] if isinstance(items, list) else items
        case _:
            inner = schema.get("schema", schema.get("lax_schema"))
            return None if inner is None else _place(inner, location, definitions)
    place = _place(below, rest, definitions)
    return None if place is None else place._replace(keys=(step, *place.keys))
