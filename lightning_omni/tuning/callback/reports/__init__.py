"""Reports of a tuned run, and metrics for loggers."""
