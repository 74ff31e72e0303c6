"""Statistical efficiency: the number of updates to a target, and the effect of staleness on momentum."""
