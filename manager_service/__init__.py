"""Decides what happens next: takes jobs over HTTP, sends work to the other services, and commits what comes back.

    HTTP ─► http ── a job's record ───► owner ──── groups to start, batches to train ─────► env, trainer
                                        owner ◄─── scored trajectories, adapter updates ─── env, trainer

The owner asks its jobs/ what could be sent, and scheduling/ what is sent. http/ and owner/ are two programs that one process runs: neither
imports the other. What both read is in records/.

    which group is issued next     `Allocator.decide` (scheduling/) picks the tenant, `next_job` (scheduling/demand.py) its job, and
                                   `Job.issue_group` (owner/jobs/) makes that job's next group
    which batch is trained next    `TrainingQueue.take` (scheduling/); its groups are those of `Job.next_batch` (owner/jobs/job.py)
    a version is committed         by the trainer, in object storage (trainer_service/versions.py). Then `Job.on_adapter` counts it, and
                                   the owner's own writes are committed by `COMMIT` (owner/transaction.py)
    an owner that dies             another one takes its leases (owner/leases.py) and rebuilds its partitions: `Partition.load` (owner/)
    a trainer that dies            another one takes over its message (common/worker/takeover.py). If it had committed the version, the
                                   other finds it in the store; if the message is lost too, the owner does (`Partition.reconcile`)
    a turn whose worker dies       another rollout worker takes it over (common/worker/takeover.py), and the owner hears nothing of it until
                                   the tenth delivery has failed too; then `Job.on_scored` gets a failed trajectory, and its group goes on
                                   without it, as long as two others are scored. A streamed turn of a chat is asked for again by
                                   http/sampling/inference.py once no worker has it. Env workers with live sessions: env_service/live/

Its files:

    http/         the HTTP API: OpenAI's, the Tinker protocol, operators' routes, the web page
    owner/        the loop that applies messages to jobs and commits the changes; its jobs/ and runs/
    scheduling/   which job is served next, as pure decisions over all jobs
    records/      what Redis and the archive hold, one file a kind
    export/       tells the outside: figures to loggers, ends of jobs to webhooks; a process of its own
    launcher/     the whole of MARLaaS on one machine: `marlaas up`, and operators' commands
    __main__.py   starts one manager: the HTTP API, and an owner for each base model's cell
    settings.py   reads the settings of one manager
"""
