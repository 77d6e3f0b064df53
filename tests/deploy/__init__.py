"""Tests of what operators run."""
