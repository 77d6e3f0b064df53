"""Servers of environments."""
