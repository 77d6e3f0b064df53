"""Tests of `chaos`, and of the parts of `harness` that only it strikes with."""
