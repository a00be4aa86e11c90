"""FedOne in Flower: a strategy for the ServerApp, a ClientApp for the nodes."""
