"""Fixtures that tests of the command line share."""

from tests.console import fedone

__all__ = ["fedone"]
