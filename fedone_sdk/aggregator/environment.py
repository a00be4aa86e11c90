"""Settings from a YAML file, overridden by environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from fedone_sdk.errors import SpecError, needs_extra
from fedone_sdk.spec import load_yaml, validate_spec

PREFIX = "FEDONE_"
"""Prefix of all variables."""

_DELIMITER = "__"
_FIELD = re.compile(r'field "(\w+)"')

ModelT = TypeVar("ModelT", bound=BaseModel)


def load_settings(model: type[ModelT], path: str | Path | None) -> ModelT:
    """Load settings from a file and the environment, which takes precedence.

    ``FEDONE_AUTH__ADMIN_TOKEN`` is the key ``auth.admin_token``; lists and mappings are JSON.
    Mappings are merged key by key, other values are replaced. Variables that do not match a key of
    the model are ignored.

    Raises:
        SpecError: One line per mistake: file, key, variable, what is allowed; never a value of the
            environment.
    """
    document = {} if path is None else load_yaml(path)
    source = "environment" if path is None else str(path)
    given = _from_environment(model)
    if given:
        if not isinstance(document, dict):
            raise SpecError("must be a mapping", source=source)
        document = _merged(document, given)
    try:
        return validate_spec(model, document, source=source)
    except SpecError as exc:
        variables = _variables(model)
        problems = [_naming_variable(problem, variables) for problem in exc.problems]
        raise SpecError(problems, source=source) from None


def _from_environment(model: type[BaseModel]) -> dict[str, Any]:
    with needs_extra("settings from the environment", "server"):
        from pydantic_settings import EnvSettingsSource, SettingsError

    source = EnvSettingsSource(
        cast(Any, model),  # Only its fields are used.
        env_prefix=PREFIX,
        env_nested_delimiter=_DELIMITER,
        env_parse_none_str="null",
    )
    try:
        return source()
    except SettingsError as exc:
        # Without text and cause, which may contain a secret.
        found = _FIELD.search(str(exc))
        names = [
            name
            for name, key in _variables(model).items()
            if found is None or key.partition(".")[0] == found[1]
        ]
        raise SpecError(
            f'{", ".join(names)}: a list or mapping must be JSON, such as ["one", "two"]',
            source="environment",
        ) from None


def _variables(model: type[BaseModel]) -> dict[str, str]:
    """Return the set variables that match keys of the model: variable -> key."""
    keys = {
        name: name.upper().removeprefix(PREFIX).lower().replace(_DELIMITER, ".")
        for name in os.environ
        if name.upper().startswith(PREFIX)
    }
    return {name: key for name, key in keys.items() if key.partition(".")[0] in model.model_fields}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _merged(before, value)
        merged[key] = value
    return merged


def _naming_variable(problem: str, variables: Mapping[str, str]) -> str:
    """Return the problem with the variable that set its key."""
    key, colon, rest = problem.partition(": ")
    for name, given in variables.items():
        if colon and (key == given or key.startswith(f"{given}.")):
            return f"{key} (from {name}): {rest}"
    return problem
