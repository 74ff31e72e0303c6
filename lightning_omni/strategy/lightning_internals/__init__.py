"""All access to private names of Lightning, which may change in any release. Checked on Lightning 2.6.6.

``tests/unit/strategy/test_private.py`` fails when one of these names is gone or behaves otherwise.
"""
