"""Results that clients wait for.

    done ─► waiting ─► results ─► retrieval (routes)
    rollout ─► samples ──────────┘

Its files:

    waiting.py    hears which operations have their results
    results.py    gives an operation's result, as its client wants it
    samples.py    runs requests for samples, and keeps what they give until it is retrieved
    finished.py   tells a sampler's client which requests are finished, many at once
    peers.py      asks the replica that made a request for its samples
    patience.py   answers a client that waits when nothing can be said, for it repeats at once after an error
"""
