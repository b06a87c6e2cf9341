"""`rondel serve MODEL --training`: others train adapters of one base over HTTP, as the `tinker` SDK speaks.

app ── sessions, futures, runs ── TrainingBackend (backend.py) ── AdapterService: one base, one adapter a client
"""
