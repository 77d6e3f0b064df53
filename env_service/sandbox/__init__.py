"""Runs tenants' Python code, each call in a process of its own."""
