"""The state of a run: in checkpoints, for a rollback, in transfer between ranks, and in a validation."""
