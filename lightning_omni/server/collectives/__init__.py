"""Collectives of all live ranks: their contributions, and the points at which ranks wait for each other."""
