"""Routes of fine-tuning jobs.

    POST ─► submission: parsed ─► job_checks: checked against all that there is ─► job_store: one script creates it ─► the owner
    GET  ─► job_store: records in Redis, or in the archive

Its files:

    estimates.py        says what a new job would need, and when a running one ends
    events.py           serves a job's events, also as a stream
    hyperparameters.py  checks a job's hyperparameters, and makes them what the job uses
    integrations.py     checks a job's loggers
    job_checks.py       checks a new job against what there is, and makes its JobSpec
    jobs.py             serves jobs: create, list, retrieve, cancel, pause, resume
    results.py          serves what a job has made: curves of its figures, checkpoints, adapters
    sample_routes.py    serves what a job's steps were trained on, to read
    submission.py       parses the body of a new job
"""
