"""The objects that methods work on: master weights, replicas, fragments, merged heads, and modules as plain data."""
