"""``lightning-omni compare``: a decision for machines that a user describes."""
