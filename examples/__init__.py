"""Programs to read and to run: `demo.py` (`make demo`), `tinker_arithmetic.py` (`make tinker`), and
`quickstart.py`, the shortest use of the API.
"""
