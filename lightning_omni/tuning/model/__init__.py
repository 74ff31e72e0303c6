"""Models of seconds per update, the settings that they compare, and the split of a batch by speed."""
