"""``lightning-omni serve``: a standalone parameter server."""
