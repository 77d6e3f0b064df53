"""Tests of `rollout_service`."""
