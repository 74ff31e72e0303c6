"""The objects that methods work on: master weights, replicas, fragments, merged heads, and sums of pushes."""
