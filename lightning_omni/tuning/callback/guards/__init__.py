"""Guards of a tuned run: divergence, flat losses, and a speed other than forecast."""
