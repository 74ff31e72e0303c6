"""The state of a run: in checkpoints, for a rollback, in transfer, and in a validation."""
