"""Groups that join a run under Lightning: the state that they receive, and rejoining after an eviction."""
