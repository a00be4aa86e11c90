"""The final numbers of a run, as trackers show them."""

from __future__ import annotations

from fedone_sdk.messages import RunResult


def summary_of(result: RunResult) -> dict[str, float]:
    """Return metric, cost and time by name, without those that are not measured or priced."""
    metric, spent = result.metric, result.spent
    numbers = {
        f"{metric.name}_no_prompt": metric.no_prompt,
        f"{metric.name}_before": metric.before,
        f"{metric.name}_after": metric.after,
        "rounds": result.rounds,
        "spent_queries": spent.queries,
        "evaluation_queries": result.evaluation.queries,
        "spent_requests": spent.requests,
        "spent_prompt_tokens": spent.prompt_tokens,
        "spent_completion_tokens": spent.completion_tokens,
        "spent_usd": float(spent.usd) if result.priced else None,
        "cache_hits": result.cache.hits,
        "wall_s": result.wall_s,
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}
