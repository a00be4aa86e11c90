"""Attacks and intervals that several benches use."""
