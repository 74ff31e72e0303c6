"""Exchanges of a compute group: with the parameter servers, inside the group, and with other groups."""
