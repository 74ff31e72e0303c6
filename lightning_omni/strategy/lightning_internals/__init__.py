"""All access to private names of Lightning, which may change in any release. Checked on Lightning 2.6.6.

Everything is in this one folder so that it can be checked against a new release of Lightning: ``tests/test_private.py``
fails when one of these names is gone or behaves otherwise.
"""
