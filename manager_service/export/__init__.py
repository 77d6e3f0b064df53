"""Tells the outside what happens to jobs: figures to loggers, ends to webhooks: `python -m manager_service.export`.

    exports, events:<job> ─► exporter ─ rows ─► passes ─► writer (a process for each pass) ─► wandb, trackio
    ends, job:<job> ───────► webhooks ─ signed ─► URLs of tenants
                             notes ◄─ what failed for good or waits ─► the job's events

Nobody waits for this process, and it may lose what it holds: rows and calls come at least once, each with a key
by which a second one is dropped.

Its files:

    __main__.py      starts the exporter
    lease.py         lets one exporter work at a time
    cells.py         reads jobs and their events, from Redis or the archive
    exporter.py      decides which jobs' rows are written when, and remembers how far each is
    rows.py          makes rows of events, with the names of metrics that others use
    passes.py        runs a writer for some jobs of one tenant
    writer.py        the writer: hands rows to a logger's own library
    wandb_runs.py    W&B: runs on a server, or fragments of offline runs
    webhooks.py      tells webhooks of the ends of jobs, signs, tries again
    notes.py         writes warnings into jobs' events
"""
