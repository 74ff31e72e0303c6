"""Callbacks that make training faster, for both of Lightning's namespaces.

Lightning is imported when one is created.
"""
