"""Rollout workers pass adapters on to each other, so that the store is read once.

    store ─► worker ─► worker ─► worker        a chain: each has at most one follower of a file, and passes parts on as they come
                 └── joins, each second renews ──► Redis: `holders:<sha256>`, `peer-key`

A part is used or passed on only if its sha256 is the manifest's. Whatever fails here ends in reading the store.

    holders.py   finds whom to follow for a file, and tells the others what this worker has (Redis)
    folder.py    keeps files by their sha256 for all workers of a machine, and outlives them
    server.py    sends what this worker has to its followers
    chain.py     fetches a file part by part: from a holder, from another if that fails, from the store at last
    speed.py     tells a slow holder from one that waits itself
    base_fetch.py  fetches a base model into the node folder
    convoys.py   gives loaders of one base model its stages, and finds which of them serve together (Redis)
"""
