"""The recipe: one file for each of its sections, `job` for the whole, and how it is read and explained. No torch."""
