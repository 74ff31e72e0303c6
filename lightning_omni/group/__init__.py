"""The compute group's state machine, the counterpart of `lightning_omni.server`. No sockets, clocks or threads."""
