"""The engine of flows: draws chains of denoising steps where others draw tokens."""
