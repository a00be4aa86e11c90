"""HTTP: requests in, answers out, with the guards around them."""
