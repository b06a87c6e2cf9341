"""Several recipes as one job: specialists, then one student from all of them. Runs without torch; each stage is a
process of its own.
"""
