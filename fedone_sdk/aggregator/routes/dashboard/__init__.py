"""The page at ``/`` for people who watch runs: modules and styles as they are, no build step."""

from fedone_sdk.aggregator.routes.dashboard.files import FILES, PAGE, PageFile

__all__ = ["FILES", "PAGE", "PageFile"]
