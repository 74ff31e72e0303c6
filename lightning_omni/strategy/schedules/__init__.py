"""Learning-rate schedulers that follow the progress of all groups."""
