"""Layers that keep a state of fixed size instead of keys and values: their recurrences, and where states come from."""
