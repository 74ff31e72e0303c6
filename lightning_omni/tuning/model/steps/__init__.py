"""The time of a step: its timer, its parts, and the split of a batch among ranks of different speed."""
