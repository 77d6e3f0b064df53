"""The protocol's records in Redis: an API replica writes what a client asks for, the partition's owner what comes of it.

Its files:

    sessions.py     keeps sessions, and says which are alive
    runs.py         finds runs and their checkpoints, and creates runs
    submission.py   puts an operation into its run's stream, once
    samplers.py     keeps what each sampler samples with
    uses.py         notes that a version is used, so that it is not deleted
"""
