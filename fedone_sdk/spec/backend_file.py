"""Files with a `backend` section only."""

from __future__ import annotations

from pathlib import Path

from fedone_sdk.errors import SpecError
from fedone_sdk.spec.backends import BackendSpec
from fedone_sdk.spec.base import Spec, load_yaml, validate_spec
from fedone_sdk.spec.run import RunSpec

_PREFIX = "backend."


class _File(Spec):
    backend: BackendSpec


def load_backend(path: str | Path) -> BackendSpec:
    """Reads a `backend` section from a file.

    Args:
        path: A YAML file with the keys of the section; or with the key ``backend``, and other keys
            of a RUN.yaml, which are ignored.

    Raises:
        SpecError: One line per mistake: file, key, what is allowed.
    """
    source, document = str(path), load_yaml(path)
    if not isinstance(document, dict):
        raise SpecError("must be a mapping: kind, model ...; or backend: {...}", source=source)
    if "backend" not in document:
        try:
            return validate_spec(_File, {"backend": document}, source=source).backend
        except SpecError as exc:  # The keys are at the top level.
            problems = [problem.removeprefix(_PREFIX) for problem in exc.problems]
            raise SpecError(problems, source=source) from None
    unknown = [str(key) for key in document if key not in RunSpec.model_fields]
    if unknown:
        allowed = "the file may be a RUN.yaml, or its backend section"
        raise SpecError([f"{key}: unknown key ({allowed})" for key in unknown], source=source)
    return validate_spec(_File, {"backend": document["backend"]}, source=source).backend
