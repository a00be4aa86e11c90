"""Base of spec models: strict validation, YAML, and readable errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedone_sdk.errors import SpecError, needs_extra

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""Name of a run, in specs, messages and paths."""


class Spec(BaseModel):
    """Base of all specs: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


SpecT = TypeVar("SpecT", bound=BaseModel)


def validate_spec(model: type[SpecT], value: object, *, source: str) -> SpecT:
    """Validate a mapping, with readable errors.

    Raises:
        SpecError: One line per mistake: source, key, what is allowed.
    """
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        raise SpecError(list(_problems(exc, model)), source=source) from None


def load_yaml(path: str | Path) -> Any:
    """Read a YAML file; duplicate keys are an error.

    Raises:
        SpecError: The file is missing or not YAML.
        MissingExtraError: PyYAML is not installed.
    """
    with needs_extra("reading YAML", "cli"):
        import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    line = node.start_mark.line + 1
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} stands twice in the block at line {line}"
                    )
            return super().construct_mapping(node, deep)

    try:
        text = Path(path).read_text(encoding="utf-8")
        return yaml.load(text, Loader)
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(path)) from exc
    except UnicodeDecodeError as exc:
        raise SpecError("is not UTF-8 text", source=str(path)) from exc
    except yaml.YAMLError as exc:
        raise SpecError(f"is not YAML: {' '.join(str(exc).split())}", source=str(path)) from exc


def _problems(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    tags = _tags(model)
    for item in error.errors(include_url=False):
        key = ".".join(str(step) for step in item["loc"] if step not in tags)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            allowed = ", ".join(sorted(_siblings(model, item["loc"], tags)))
            message = f"unknown key (allowed: {allowed})" if allowed else "unknown key"
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] in ("union_tag_invalid", "union_tag_not_found"):
            context = item.get("ctx", {})
            message = "is required"
            if "tag" in context:
                message = f"{context['tag']!r} is not one of {context.get('expected_tags')}"
            key = f"{key}.{str(context.get('discriminator')).strip(chr(39))}"
        elif item["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]} (got {item['input']!r:.80})"
        yield f"{key}: {message}" if key else message


def _tags(model: type[BaseModel]) -> set[object]:
    """Whether pydantic added a step to an error's path that is not in the file.

    These are the member of a tagged union, and the mark of a mapping's key.
    """
    seen: set[type[BaseModel]] = set()
    ahead = [model]
    while ahead:
        found = ahead.pop()
        if found not in seen:
            seen.add(found)
            for field in found.model_fields.values():
                ahead.extend(_models_in(field.annotation))
    return {"[key]"} | {tag for tag in map(_tag_of, seen) if tag is not None}


def _siblings(
    model: type[BaseModel], location: tuple[str | int, ...], tags: set[object]
) -> set[str]:
    """Return the allowed keys at the level of the last step of `location`."""
    models: list[type[BaseModel]] = [model]
    for step in location[:-1]:
        if step in tags:
            tagged = [m for m in models if _tag_of(m) == step]
            models = tagged or models
            continue
        models = [
            inner
            for outer in models
            if step in outer.model_fields
            for inner in _models_in(outer.model_fields[str(step)].annotation)
        ]
    return {name for found in models for name in found.model_fields}


def _tag_of(model: type[BaseModel]) -> object:
    for name in ("kind", "name"):
        field = model.model_fields.get(name)
        values = getattr(field.annotation, "__args__", ()) if field else ()
        if values:
            return values[0]
    return None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models_in(inner)
