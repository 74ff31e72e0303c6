"""Callbacks that make training faster, for both of Lightning's namespaces.

`lightning_omni` exports classes that are callbacks in both (``both_namespaces.py``). Lightning is imported when one is
created.
"""
