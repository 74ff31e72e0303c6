"""The model on a rank: its wrapping, its flat replica, sharded models, buffers, and writes of user code."""
