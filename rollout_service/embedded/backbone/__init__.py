"""Computes the base model for the rows of the embedded engine.

Its files:

    fused.py   our decoder, with few and large operations
"""
