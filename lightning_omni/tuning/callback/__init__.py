"""Callbacks that make training faster, for both of Lightning's namespaces."""
