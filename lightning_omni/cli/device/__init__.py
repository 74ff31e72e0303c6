"""``lightning-omni device``: the fastest settings of this machine."""
