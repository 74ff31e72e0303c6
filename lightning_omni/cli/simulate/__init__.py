"""``lightning-omni simulate``: runs in virtual time."""
