"""The server's records: the record of a run for replays, and the restoring of a saved state with its journal."""
