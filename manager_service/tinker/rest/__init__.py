"""What the SDK's `RestClient` and its command line ask for: what there is, beside any training.

Its files:

    listings.py     lists runs, checkpoints and sessions
"""
