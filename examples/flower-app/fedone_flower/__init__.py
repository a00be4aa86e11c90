"""FedOne in Flower."""
