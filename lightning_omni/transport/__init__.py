"""The transports that carry messages between ranks and servers: the interface, in memory, and ZeroMQ."""
