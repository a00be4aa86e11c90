"""The base of specs, messages and records."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable model, with finite numbers only and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
