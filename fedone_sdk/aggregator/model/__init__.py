"""What asks a language model for a run: the gateway, evaluation, the proposer."""
