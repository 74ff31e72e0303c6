"""Epochs whose samples are leased to groups while they are trained, and validations in between."""
