"""Runs: adapters whose user keeps the training loop, through the Tinker protocol. The owner's part.

    API ─ Operation ─► ops:<p> ─► Run ─ Operations ─► trainers ─ OperationsDone ─► Run ─► results:<run>, done
                                  Retention ─ Forget ─► trainers ─ Forgotten ─► Retention

Its files:

    run.py            holds one run's state machine: the trainer's next segment, answers from here, dead trainers
    runs.py           holds the runs of one partition, and applies messages to them
    kept_results.py   bounds what the results of a tenant's runs take in Redis
    pending.py        holds an operation with its entry, and makes the trainer's operation of it
    run_retention.py  decides which versions stay in the store, and has the others deleted
"""
