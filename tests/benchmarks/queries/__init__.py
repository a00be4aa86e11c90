"""Bench of the queries that methods need to reach the same loss, see `bench`."""
