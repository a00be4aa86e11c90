"""Fixtures that tests of benchmarks share with those of experiments."""

from tests.unit.experiments.conftest import glue

__all__ = ["glue"]
