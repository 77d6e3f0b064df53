"""Fair sharing between tenants by weight. All of it compares virtual times: what a tenant was charged, over its weight.

    what is shared                         by whom                    where
    rollout slots, groups to issue         tenants of a cell          manager_service/scheduling, corrected by correction.py
    trainers' steps                        tenants of a cell          trainer_service/fusion.py, by fairness.py
    places for completions and graders     tenants of a replica       places.py, manager_service/http/sampling
    threads for long computations          tenants of a process       places.py

Its files:

    correction.py  moves a tenant's share of the rollout slots until it gets its share of the engines' time
    fairness.py    keeps each tenant's virtual time: what it was charged, over its weight
    places.py      shares a number of places, or of threads, between tenants
"""
