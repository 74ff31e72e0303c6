"""``lightning-omni top``: a live view of a server's run."""
