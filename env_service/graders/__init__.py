"""Graders: rewards for answers."""
