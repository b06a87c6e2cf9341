"""A corpus of passages on this machine, ranked by BM25: what a policy searches, and questions about it."""
