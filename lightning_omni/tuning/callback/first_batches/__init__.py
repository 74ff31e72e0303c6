"""The first batches of a run, which are timed to choose its setting."""
