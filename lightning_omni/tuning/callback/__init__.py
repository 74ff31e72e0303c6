"""Callbacks that make training faster, for both of Lightning's namespaces.

`lightning_omni` exports classes that are callbacks in both (see ``both_namespaces.py``); ``pytorch_lightning.py`` and
``lightning.py`` have the same classes for one namespace each. Lightning is imported when a callback is created, not
before.
"""
