"""Results that clients wait for: a replica's memory holds those of samples, Redis those of operations.

    done ─► results ─► retrieval (routes)
    rollout ─► samples ─┘

Its files:
    results.py    waits for an operation's result, and encodes it
    samples.py    runs requests for samples, keeps what they give until it is retrieved, and answers other replicas' questions
"""
