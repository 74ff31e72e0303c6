"""``lightning-omni plan``: predictions for other machines."""
