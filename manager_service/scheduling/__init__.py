"""Decides which job is served next: rollouts, training, the engines' memory."""
