"""Programs that kill processes at random moments and let the provider count.

``python -m tests.chaos.killed_runs`` and ``python -m tests.chaos.shared_budget`` print their
figures, and fail on any violation.
"""
