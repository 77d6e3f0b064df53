"""Runs environments of the package `verifiers`, unmodified: each model request of theirs becomes a turn of ours.

    environment ─ open, step ─► process ─ lines over a socket ─► host ─► verifiers' own rollout
                                                                  ▲              │ asks its model: HTTP on this machine
                                                                  └──────────────┘

A package lives in a Python environment of its own, so `host.py` runs there and imports nothing of ours.

Its files:

    environment.py      the live environment, which operators subclass for each package, and its sessions
    host.py             the program that runs in the package's Python environment
    host_model.py       its part that answers the package as a model
    package_process.py  starts the hosts, speaks with them, ends those that are idle
"""
