"""One job: an event (a scored trajectory, a new version, a command) comes in, Changes go out. No I/O, no clock.

    validating ─► queued ─► running ⇄ paused ─► succeeded | failed | cancelled
                            running:  issue groups ─► scored ─► batch ─► TrainStep ─► next version ─► ...

Its files:

    job.py                  holds one job's state machine: what it may issue, what a result changes, when a version ends
    open_trajectories.py    holds a job's unsettled trajectories, in memory and as Redis has them
    groups.py               gathers scored trajectories into groups, and groups into a batch
    evaluation.py           counts the trajectories of an evaluation
    stopping.py             says when training ends early
    journal.py              writes what the user reads of a job: events, figures of steps, samples
    samples.py              makes of a trajectory what its owner reads
    orders.py               makes a job's messages to workers: Start, Init, TrainStep
    job_retention.py        decides which versions stay in the store
    items.py                reads the rows of a file from disk, and draws the order of each epoch
    changes.py              holds what an event changes, as values, and reads it as Redis commands
"""
