"""What drives the loop for a run: controller, rollouts, evaluation, recording and replay,
replay buffer, failure budget, elastic engines.
"""
