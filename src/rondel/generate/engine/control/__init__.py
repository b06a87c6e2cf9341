"""The engine of policies that act: draws an action for each observation."""
