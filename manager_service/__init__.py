"""Decides what happens next: takes jobs over HTTP, sends work to the other services, and commits what comes back.

    HTTP ─► api ─ a job's record ─► owner ─► jobs ─ "this could be sent" ─► scheduling ─ "this is sent" ─► owner ─► env, trainer
                                      ▲                                                                        │
                                      └──────────────── scored trajectories, adapter updates ◄─────────────────┘

    which group is issued next            scheduling/allocator.py picks the job; jobs/job.py picks its group
    which batch is trained next           scheduling/training_queue.py
    a turn whose worker dies              common/worker.py: another worker takes its message over; nothing is done here.
                                          A chat's turn is asked for again by api/sampling/shares.py

Its files:

    jobs/           one job: a state machine of events in, Changes out
    scheduling/     which job is served next, as pure decisions over all jobs
    owner/          the loop that applies messages to jobs and commits the changes
    api/            the HTTP API
    local/          the whole of MARLaaS on one machine
    cli/            the command line `marlaas`
    __main__.py     starts one manager: the HTTP API, and an owner for each base model's cell
    settings.py     reads the settings of one manager
    records.py      names what the manager keeps in Redis of jobs, tenants, keys and files
    data_format.py  refuses a Redis that another version wrote
    tenants.py      keeps tenants and their API keys
    cluster.py      tells who is alive, and who worked for whom when, from the workers' telemetry
"""
