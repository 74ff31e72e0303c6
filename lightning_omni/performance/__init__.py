"""How long training takes: models of seconds per update and of updates to a target, and shares by speed."""
