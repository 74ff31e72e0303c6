"""Validations while groups train: when one is due, which group evaluates, and the published weights."""
