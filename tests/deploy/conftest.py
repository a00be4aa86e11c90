"""Fixtures that the tests of deploy/ share."""

from tests.deploy.images import edge_image

__all__ = ["edge_image"]
