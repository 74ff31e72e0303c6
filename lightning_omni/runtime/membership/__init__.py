"""The forming of groups, and groups that join a run on their own."""
