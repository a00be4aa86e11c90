"""A package, so that the `tests` of another distribution does not replace it."""
