"""How long tests wait."""

from __future__ import annotations

SLOWER = 4
"""How many times as long as it takes where nothing else runs a run may take: limits are there to end runs that hang."""
