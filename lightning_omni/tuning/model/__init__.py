"""Models of seconds per update and of updates to a target, and the split of a batch by speed."""
