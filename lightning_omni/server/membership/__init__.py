"""The members of a run: ranks and groups, joining, and time-outs."""
