"""Flows: models that turn noise into data points, and the log-densities of their denoising steps."""
