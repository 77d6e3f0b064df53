"""One place of a service for several base models, of which one is open at a time.

Its files:

    choosing.py   decides which base model a pool worker opens next
    placement.py  decides which pool workers each base model has its place on
"""
