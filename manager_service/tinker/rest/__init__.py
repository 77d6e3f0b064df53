"""What the SDK's `RestClient` and its command line ask for: what there is, beside any training.

Its files:

    listings.py     lists runs, checkpoints and sessions
    checkpoints.py  serves one checkpoint: its deletion, its end, its download
    files.py        signs urls of a version's files, and reads these
"""
