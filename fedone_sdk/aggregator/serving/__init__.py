"""A run while it is served: its work, its model, its measurements, and its place in the store."""
