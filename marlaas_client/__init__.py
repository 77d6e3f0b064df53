"""The client of MARLaaS: calls of the HTTP API, and the user's half of the command line. It imports nothing of the services, so
that it can live in a user's own environment.

    arguments ─► cli ─► Client ─► HTTP API

Its files:

    client.py         calls the HTTP API
    place.py          finds where the API is, and which key opens it
    cluster_file.py   reads and writes `cluster.json`, which tells where a running cluster is
    errors.py         the errors
    cli/              the command line
"""
