"""Work that calls a language model for a run: the gateway, the evaluation, the proposer."""
