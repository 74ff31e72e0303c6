"""The parameters at the server: optimizers with their master weights, merged heads, counts of pushes."""
