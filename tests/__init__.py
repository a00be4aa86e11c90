"""A package, so that the `tests` of another distribution does not stand in its place."""
