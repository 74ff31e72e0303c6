"""A merged head at the server: its service, and the submodule that the server trains."""
