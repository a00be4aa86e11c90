"""Who may call the aggregator: tokens and roles, enrolled clients, signed requests."""
