"""``lightning-omni simulate`` and ``compare``: runs in virtual time."""
