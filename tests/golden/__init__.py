"""Golden traces: what simulated runs, replays and the server's state machine do today, as digests."""
