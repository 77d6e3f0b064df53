"""Decides what happens next: takes jobs over HTTP, sends work to the other services, and commits what comes back.

    HTTP ─► api ─── a job's record ───► owner ──── groups to start, batches to train ─────► env, trainer
                                        owner ◄─── scored trajectories, adapter updates ─── env, trainer

The owner asks jobs/ what could be sent, and scheduling/ what is sent.

    which group is issued next     `Allocator.decide` (scheduling/) picks the tenant, `next_job` (scheduling/demand.py) its job, and
                                   `Job.issue_group` (jobs/) makes that job's next group
    which batch is trained next    `TrainingQueue.take` (scheduling/)
    a turn whose worker dies       another rollout worker takes it over (common/takeover.py), and the owner hears nothing of it until the
                                   tenth delivery has failed too; then `Job.on_scored` gets a failed trajectory, and its group goes on
                                   without it, as long as two others are scored. A streamed turn of a chat is asked for again by
                                   api/sampling/shares.py once no worker has it. Env workers with live sessions: env_service/live/

Its files:

    jobs/           one job: a state machine of events in, Changes out
    scheduling/     which job is served next, as pure decisions over all jobs
    owner/          the loop that applies messages to jobs and commits the changes
    runs/           jobs whose loop their user keeps, through the Tinker protocol
    tinker/         the same runs over HTTP: the Tinker protocol
    export/         tells the outside: figures to loggers, ends of jobs to webhooks; a process of its own
    archive/        records of finished jobs, in object storage
    api/            the HTTP API
    local/          the whole of MARLaaS on one machine
    cli/            the command line `marlaas`
    __main__.py     starts one manager: the HTTP API, and an owner for each base model's cell
    settings.py     reads the settings of one manager
    records.py      names what the manager keeps in Redis of jobs, tenants, keys and files
    usage.py        names the counters of tenants' usage, and says which of them quotas count
    kept.py         bounds what is kept for people to read, by bytes
    data_format.py  refuses a Redis that another version wrote
    tenants.py      keeps tenants and their API keys
    receivers.py    keeps where their jobs report to: loggers' keys, webhooks
    env_streams.py  names the streams of env workers that hold live sessions
    cluster.py      tells who is alive, and who worked for whom when, from the workers' telemetry
"""
