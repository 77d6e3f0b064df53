"""One job: an event comes in (a scored trajectory, a new version, a command), Changes go out. No input or output, no clock.

    validating ─► queued ─► running ⇄ paused ─► succeeded | failed | cancelled
                            running:  issue groups ─► scored ─► batch ─► TrainStep ─► next version ─► ...

Its files:

    job.py                  holds one job's state machine: what may be issued, what a result changes, when a version ends
    open_trajectories.py    holds a job's trajectories that are issued and not settled, in memory and as Redis has them
    groups.py               gathers scored trajectories into groups, and groups into a batch
    evaluation.py           counts the trajectories of an evaluation
    stopping.py             says when training ends early
    journal.py              writes what the user reads of a job: events, figures of steps, samples
    samples.py              makes of a trajectory what its owner reads
    orders.py               makes the messages that a job sends to workers: Start, Init, TrainStep; decides which versions stay
    items.py                reads the rows of a file from disk, and draws the order of each epoch
    changes.py              holds what an event changes, as values, and reads it as Redis commands
"""
