"""Tests of `base_model`."""
