"""Tests of `trainer_service`."""
