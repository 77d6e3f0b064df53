"""Answers the SDK's `RestClient` and its command line: what there is, whatever trains.

Its files:

    listings.py           lists runs, checkpoints and sessions, and searches sessions
    billing.py            tells what was used, by the hour
    absent.py             refuses what is not offered, and says what to use instead
    checkpoint_routes.py  serves one checkpoint: its deletion, its end, its download
    file_links.py         signs urls of a version's files, and reads these
"""
