"""The application of a setting to a run: groups, exchange, momentum and learning rate."""
