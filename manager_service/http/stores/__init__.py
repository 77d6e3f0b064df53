"""Finds jobs, runs and their versions, and writes what clients ask for: each by one script. Both protocols use them.

    a route ─► a store ─► Redis ─► the partition's owner ─► what came of it ─► Redis ─► a store ─► a route

Its files:

    job_store.py         reads jobs and their records, and creates jobs by one script
    model_names.py       finds the adapter that a model's name means
    operation_store.py   puts an operation into its run's stream, once
    run_store.py         finds runs and their checkpoints, creates runs, deletes checkpoints
    sampler_store.py     keeps what each sampler samples with
    session_store.py     keeps sessions, and says which are alive
    tinker_names.py      says what names mean: base models, paths, samplers, futures
"""
