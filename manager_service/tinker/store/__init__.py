"""The protocol's records in Redis: an API replica writes what a client asks for, the partition's owner what comes of it.

Its files:

    sessions.py     keeps sessions, and says which are alive
    runs.py         finds runs and their checkpoints, and creates runs
    checkpoints.py  deletes checkpoints, and changes when they expire
    submission.py   puts an operation into its run's stream, once
    samplers.py     keeps what each sampler samples with
"""
