"""Routes of fine-tuning jobs.

    POST ─► submission: the body, parsed and checked ─► job_store: one script creates the job ─► the owner
    GET  ─► job_store: records in Redis, or in the archive

Its files:

    curves.py           serves the figures of a job's steps, in few points
    estimates.py        says what a new job would need, and when a running one ends
    events.py           serves a job's events, also as a stream
    hyperparameters.py  checks a job's hyperparameters, and makes them what the job uses
    integrations.py     checks a job's loggers
    jobs.py             serves jobs: create, list, retrieve, cancel, pause, resume
    results.py          serves what a job has made: checkpoints, metrics, adapters
    sample_routes.py    serves what a job's steps were trained on, to read
    starts.py           finds what a new job starts from
    submission.py       checks a new job, and makes its JobSpec
"""
