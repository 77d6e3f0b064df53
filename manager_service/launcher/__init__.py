"""The whole of MARLaaS on one machine, as `marlaas up` runs it: settings come in, running processes go out.

    supervisor ─► embedded_redis, manager, rollout, env, trainer      (each restarted when it ends, all stopped together)

Its files:

    supervisor.py      starts every service, restarts those that end, stops all of them
    devices.py         assigns workers to devices, with their shares of memory
    gpus.py            finds the GPUs, and gives workers theirs
    settings.py        reads the settings that only `marlaas up` has
    plan.py            says what of a base model fits on one device or several
    fitting.py         says what of base models fits in a memory
    engines.py         says what each engine of rollouts takes of a device
    elastic_pool.py    starts and stops rollout workers as their cell wants them
    embedded_redis.py  finds the Redis server, starts it on a data folder, and keeps room on its disk
    own_store.py       waits until the store's folder is the one that the cells know
    commands/          the command line `marlaas`
    memory_shares.py   chooses the context that is served, and the memory of workers
"""
