"""Fixtures that tests of several folders share."""

from tests.postgres import database, postgres

__all__ = ["database", "postgres"]
