"""Programs that kill processes at random moments, and compare counts and results.

`killed_runs` compares with what a provider received, `servers` kills aggregators, and `devices`
kills an edge client and cuts its power. Each prints its figures, and fails on any violation.
"""
