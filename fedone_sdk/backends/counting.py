"""Token counts of queries to models in this process, by the tokeniser without the model."""

from __future__ import annotations

from fedone_sdk.backends.base import Query
from fedone_sdk.backends.fitting import CausalEncoder, ClozeEncoder
from fedone_sdk.budget import Usage


def count_tokens(
    encoder: CausalEncoder | ClozeEncoder, query: Query, *, multi_token_labels: bool = False
) -> Usage:
    """The usage of a query, without loading the model.

    Each input counts once, with its longest label word or reference except for the last token,
    which the model does not read. Embedding vectors of a soft prompt count as tokens; keys and
    values do not, and the truncation that they cause is not subtracted.

    Returns:
        An upper bound on the answer's usage; a generated text counts `Query.max_tokens` per input.

    Raises:
        BackendError: An input does not fit the model.
        LabelWordError: A label word is not one token and must be.
    """
    soft = query.soft_prompt
    num_soft = soft.shape[0] if soft is not None and soft.kind == "embeddings" else 0
    if isinstance(encoder, ClozeEncoder):
        for word in query.label_words:
            encoder.label_id(word)
        lengths = [len(encoder.encode(each, num_soft=num_soft).ids) for each in query.inputs]
        return Usage(queries=1, requests=1, prompt_tokens=sum(lengths))
    if query.want == "text":
        lengths = [
            len(encoder.encode(each, reserve=query.max_tokens, num_soft=num_soft))
            for each in query.inputs
        ]
        written = query.max_tokens * len(query.inputs)
        return Usage(queries=1, requests=1, prompt_tokens=sum(lengths), completion_tokens=written)
    reserves = [max(length - 1, 0) for length in _asked(encoder, query, multi_token_labels)]
    lengths = [
        len(encoder.encode(each, reserve=reserve, num_soft=num_soft)) + reserve
        for each, reserve in zip(query.inputs, reserves, strict=True)
    ]
    return Usage(queries=1, requests=1, prompt_tokens=sum(lengths))


def _asked(encoder: CausalEncoder, query: Query, multi_token_labels: bool) -> list[int]:
    """Per input, the tokens of the longest text to score."""
    if query.want == "reference":
        return [len(encoder.continuation(text)) for text in query.references]
    labels = encoder.label_ids(query.label_words, query.inputs[0], several=multi_token_labels)
    return [max(map(len, labels), default=1)] * len(query.inputs)
