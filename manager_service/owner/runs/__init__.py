"""Runs: adapters whose training loop is their user's own, through the Tinker protocol. The part of a partition's owner.

    API ─ Operation ─► ops:<p> ─► Run ─ Operations ─► trainers ─ OperationsDone ─► Run ─► results:<run>, done
                                  Retention ─ Forget ─► trainers ─ Forgotten ─► Retention

Its files:

    run.py            holds one run's state machine: what a trainer does next, what is answered here, what a dead trainer means
    runs.py           holds the runs of one partition, and applies messages to them
    pending.py        holds an operation with its entry, and makes the trainer's operation of it
    run_retention.py  decides which versions stay in the store, and has the others deleted
"""
