"""Tests of `manager_service.tinker`."""
