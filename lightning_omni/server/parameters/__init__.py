"""The parameters at the server: master weights, merged heads, checks and counts of pushes."""
