"""The part that all services share. Imports no service and no torch.

    a worker:  bus ─ message ─► worker ─► handler ─ messages ─► bus            store: object storage, and the adapters in it

Its files:

    text/            from chat messages to tokens and back
    settings.py      reads the settings that all services share
    errors.py        declares the error tree
    log.py           writes logs as events
    outgoing.py      checks URLs that users give, and calls them where the operator allows the host
    private_networks.py  lists the networks that those may not lead into
    rng.py           draws random numbers as functions of their coordinates
    bus/             publishes and reads messages in Redis Streams
    children/        child processes, and helpers that are asked
    peers/           passes adapters on from worker to worker
    models/          base models as numbers: sizes, families, memory
    pool/            one place of a service for several base models
    sharing/         shares what is scarce between tenants
    store/           object storage, and the versions of adapters in it
    tasks/           environments and graders as data
    wire/            messages, and their bytes
    worker/          the loop of every worker
    cancellation.py  ends asyncio's tasks for certain, beats while one runs
    suggestions.py   suggests the name that somebody meant
"""
