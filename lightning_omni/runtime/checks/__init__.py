"""Checks of loops without Lightning: same tensors, reduced gradients, the number of steps, and guarded weights."""
