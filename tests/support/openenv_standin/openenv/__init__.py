"""Stands in for the package `openenv`, whose dependencies are many: the part that a server is written against, and its protocol.

Its answers were compared with those of openenv 0.10.0 by `tests/env/test_openenv.py`, run against a server of the real package.
"""
