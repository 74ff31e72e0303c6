"""The parameters at the server: optimizers with their master weights, merged heads, checks and counts of pushes."""
