"""Policies that act in worlds: an observation in, an action out."""
