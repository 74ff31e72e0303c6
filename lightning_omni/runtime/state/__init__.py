"""The state of a run: in checkpoints, at the servers, in transfer between ranks, and for a rollback."""
