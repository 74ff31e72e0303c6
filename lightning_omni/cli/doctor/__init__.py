"""``lightning-omni doctor``: checks of the connection to a server."""
