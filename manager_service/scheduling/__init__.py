"""Decides who is served next: the state of all jobs comes in, decisions go out. Nothing here waits, reads a stream or writes one.

    Demand ─ who wants what ─► Allocator ─┬─ a queued job starts
                                          ├─ a group is issued     (the tenant furthest below its share goes first)
                                          └─ a batch is trained

Its files:

    allocator.py        decides which job starts, which gets a group, and whose batch trains
    fairness.py         computes room and order for the allocator
    correction.py       corrects a share of the rollout slots by what it got of the engines' time
    members.py          says what decisions need to know of a job or a run, and lists them
    demand.py           sums up what all of them want, and keeps the sums current by difference
    lengths.py          estimates how long a job's trajectories under way will be, from those that ended
    policies.py         says what each scheduling policy does differently, as one row of data
    training_queue.py   orders the complete batches for the trainers
"""
