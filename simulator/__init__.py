"""A MARLaaS under a virtual clock: the owner's own decisions, simulated workers.

It stands beside the benchmarks, not in the manager, because its workers stand for all four services and nothing that runs in
production needs them. What decides is not simulated: `Job`, `Demand`, `Allocator`, policies and training queue are the very
objects of `manager_service`; state goes in, Changes come out, and the messages in them go to simulated workers.
"""
