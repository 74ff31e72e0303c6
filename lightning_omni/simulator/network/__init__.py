"""The simulated network: exchanges with the servers, and links that several messages share."""
