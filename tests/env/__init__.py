"""Tests of `env_service`."""
