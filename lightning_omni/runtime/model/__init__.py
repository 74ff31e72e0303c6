"""The model on a rank: its wrapper, its flat replica, sharded models, buffers, and writes of user code."""
