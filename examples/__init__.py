"""Programs to read and to run: `demo.py` (`make demo`), and `quickstart.py`, the shortest use of the API."""
