"""Programs to read and to run.

`demo.py` (`make demo`), `quickstart.py`, the shortest use of the API, and `tinker_loop.py`, a loop of one's own through the `tinker`
SDK (`make tinker`).
"""
