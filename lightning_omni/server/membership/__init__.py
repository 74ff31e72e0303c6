"""The members of a run: the roster of ranks, groups, joining, numbers of new ranks, and time-outs."""
