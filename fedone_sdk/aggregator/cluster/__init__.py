"""Several aggregators on one store: their signals, the leader, and what it does."""
