"""Fair sharing between tenants by weight. Fairness and places compare virtual times, a tenant's charges over its
weight; correction.py compares engine seconds with what is due.

    what is shared                          among                          where
    an owner's part of the rollout slots    owners, replicas with chats    weights: owner/leases.py; allocator.py, by correction.py
    groups to issue, examples to measure    tenants of an owner            manager_service/scheduling/allocator.py, by fairness.py
    complete batches for the trainers       tenants of an owner            manager_service/scheduling/training_queue.py, by fairness.py
    micro-batches of a trainer              tenants with steps there       trainer_service/fusion.py and driver.py, by fairness.py
    places of a cell, for chats and graders replicas                       manager_service/http/sampling/cell_share.py, by correction.py
    places of a replica                     its tenants                    manager_service/http/sampling/places.py, by places.py
    env slots, sandboxes, sessions,         tenants of a process           places.py
    downloads, loggers, webhooks
    threads for long computations           tenants of a process           places.py
    rounds of a manager's event loop        its tenants                    places.py

A tenant's own jobs share by priorities and deadlines, not by weights (manager_service/scheduling/demand.py).

Its files:

    correction.py  moves a tenant's share of the rollout slots until it gets its share of the engines' time
    fairness.py    keeps each tenant's virtual time: what it was charged, over its weight
    places.py      shares a number of places, of threads, or rounds of the event loop between tenants
"""
