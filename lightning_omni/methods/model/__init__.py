"""The objects that methods work on: weights, replicas, fragments, merged heads, and modules as plain data."""
