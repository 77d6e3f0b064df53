"""Tests of `manager_service`."""
