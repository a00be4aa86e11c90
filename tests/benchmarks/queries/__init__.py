"""Queries that methods need for the same loss: evidence of this project, see its `bench`."""
