"""Wrappers that add caching, retries, limits, budgets and recording to any backend."""

from fedone_sdk.backends.wrappers.budgeted import BudgetedBackend
from fedone_sdk.backends.wrappers.cache import CachedBackend
from fedone_sdk.backends.wrappers.rate_limit import RateLimitedBackend
from fedone_sdk.backends.wrappers.recording import RecordingBackend
from fedone_sdk.backends.wrappers.retry import RetryingBackend
from fedone_sdk.backends.wrappers.split import SplitBackend
from fedone_sdk.backends.wrappers.wrapper import Watch, WatchedBackend, Wrapper

__all__ = [
    "BudgetedBackend",
    "CachedBackend",
    "RateLimitedBackend",
    "RecordingBackend",
    "RetryingBackend",
    "SplitBackend",
    "Watch",
    "WatchedBackend",
    "Wrapper",
]
