"""Programs that kill processes at random moments, and compare or let the provider count.

``python -m tests.chaos.killed_runs`` and ``shared_budget`` watch what a provider is asked;
``journal``, ``served_runs`` and ``replicas`` kill aggregators; ``devices`` kills an edge client and
cuts its power. Each prints its figures, and fails
on any violation.
"""
