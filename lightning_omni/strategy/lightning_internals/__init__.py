"""Access to private names of Lightning, which may change in any release. Checked on Lightning 2.6.6."""
