"""Fixtures that tests of several folders share."""

from importlib.util import find_spec

from tests.postgres import database, postgres

__all__ = ["database", "postgres"]

if find_spec("hypothesis") is not None:  # some extras are tested without it
    from hypothesis import settings

    # How long an example takes says more of the machine than of the code.
    settings.register_profile("fedone", deadline=None)
    settings.load_profile("fedone")
