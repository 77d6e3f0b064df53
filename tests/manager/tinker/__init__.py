"""Tests of `manager_service.http.tinker`."""
