"""Decides who is served next: the state of all jobs comes in, decisions go out. Does not wait, nor touch streams.

    Demand ─ who wants what ─► Allocator ─┬─ a queued job starts
                                          ├─ a group is issued     of the tenant furthest below its share, and of its jobs the one that
                                          │                        `next_job` of demand.py names
                                          └─ a batch is trained    the one that `TrainingQueue.take` gives

A *member* is a job, or a run: a job whose user keeps the training loop (manager_service/owner/runs/).

Its files:

    allocator.py       decides which job starts, which gets a group, and whose batch trains
    elastic.py         says how many rollout workers there should be, and which one may stop
    fairness.py        computes how much room there is, and the order of tenants
    members.py         lists jobs and runs, with what decisions need of each, and estimates trajectories' lengths
    demand.py          sums up what all of them want, by difference, and says which job of a tenant is next
    policies.py        has a row of data for each scheduling policy: what it does differently
    storage_quota.py   says which tenants keep all that they may in object storage
    training_queue.py  orders the complete batches for the trainers
"""
