"""Lightning's loops over leased data."""
