"""The parameter server's state machine: a message goes in, and replies come out. No sockets, clocks or threads."""
