"""Results that clients wait for: a replica's memory holds those of samples, Redis those of operations.

    done ─► operation_futures ──► retrieval (routes)
    rollout ─► sample_futures ─┘

Its files:

    operation_futures.py  gives an operation's result, as its client wants it
    sample_futures.py     runs requests for samples, and keeps what they give until it is retrieved
"""
