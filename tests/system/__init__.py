"""Tests of whole clusters, of what the README promises, and of the base model."""
