"""The optimizers and parameters of a fit: proxies whose steps are exchanges, and checks of wrapped modules."""
