"""The part that all services share: messages, the bus that carries them, the loop of every worker, the store of adapters.

    a worker:  bus ─ message ─► worker ─► handler ─ messages ─► bus            objects ◄─► adapters

A worker renews the entries that it works on. When it dies, takeover.py of another finds them after a lease (10 s) and works on them.
On its second delivery an entry runs beside others. From the third it runs alone, unless the worker before it saved progress; from the
sixth, always. The job's owner hears nothing of workers that die until the tenth delivery has failed too. Then the entry becomes a dead
letter, and the job gets a failed trajectory, which its group leaves out. When an env worker is gone, env_service/live/ moves the entries
of its own stream, which were for its live sessions, to the stream that all env workers read.
This package imports no service and no torch.

    text/                 from chat messages to tokens and back
    messages.py           declares what one service says to another about jobs
    arrays.py             numpy's arrays as messages carry them
    transcript.py         tokens, with who wrote each and how likely it was
    operations.py         declares what one service says to another about runs
    wire.py               makes bytes of messages, and messages of bytes
    streams.py            names every key of a cell
    deliveries.py         entries of streams as workers hold them
    history.py            sends a trajectory's parts once: short forms of results and later requests
    histories.py          reads what they refer to
    bus.py                publishes, and acknowledges by one script
    payloads.py           makes fields of messages; large ones travel by way of object storage
    scripts.py            what Redis does for the bus in one go
    redis_connection.py   connects to Redis, packs commands in C, and tells errors that pass
    worker.py             runs a worker: reads messages, works on them, tries again, gives up, hands back
    handlers.py           declares what a service is to its worker
    underway.py           keeps the deliveries that a worker works on
    takeover.py           takes over the entries that other workers left behind
    fullness.py           says how full Redis is
    settler.py            settles finished deliveries, many by one script
    dead_letters.py       makes a dead letter of a message that cannot be worked on
    spelling.py           finds the name that somebody meant
    service.py            starts a worker service
    membership.py         lets workers join a cell only if they compute the same bits as the others
    telemetry.py          tells once a second what a worker does
    tasks.py              ends tasks for certain, beats while one runs
    objects.py            reads and writes object storage
    store_folder.py       tells a local store's folder from another in its place
    known_store.py        waits for the store that a cell knows
    advantages.py         compares an answer with the others of its group: a row a loss
    adapters.py           keeps versions of adapters in object storage
    own_folder.py         keeps temporary files that vanish with their process, or with the next one
    byte_cache.py         caches what was used last, up to a number of bytes
    weight_files.py       reads what the headers of a base model's weights say
    base_shape.py         reads the sizes of a base model from its configuration
    families.py           says which base models each engine does not compute, and which weights our decoder needs
    footprint.py          says how much memory training, keys and values take, by those sizes
    host_memory.py        finds how much memory this process may have
    settings.py           reads the settings that all services share
    downloads.py          says how far the download of a base model is
    errors.py             declares the error tree
    fairness.py           keeps each tenant's virtual time: what it was charged, over its weight
    helpers.py            asks helper processes, and runs one
    places.py             shares a number of places between tenants
    threads.py            shares threads between tenants
    log.py                writes logs as events
    environments.py       declares environments as data, and checks them
    graders.py            declares graders as data, and checks them
    templates.py          fills `{{item.x}}` and `{{sample.output_text}}`
    urls.py               checks URLs that users give
    outgoing.py           calls them, where the operator allows the host
    formula.py            computes arithmetic without `eval`
    rng.py                draws random numbers as functions of their coordinates
    skills.py             makes questions with one right answer each
"""
