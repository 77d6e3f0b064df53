"""A MARLaaS under a virtual clock: a calibration comes in, the figures of a run of N jobs go out.

    telemetry of a run ─► calibrate, fit ─► calibration.json ─► world: the owner's own decisions ⇄ simulated workers ─► figures

What decides is not simulated: `Job`, `Demand`, `Allocator`, policies and training queue are the very objects of
`manager_service`. State goes in, Changes come out, and the messages in them go to simulated workers.

    __main__.py      predicts runs of N jobs under any policy, on any number of workers
    calibrate.py     makes a calibration of a run's telemetry
    fit.py           fits service times to telemetry
    calibration.py   holds a calibration, and the figures of a run
    clock.py         runs the virtual clock, and shares processors under it
    workers.py       simulates env workers and trainers: what they take, and how long
    engine.py        simulates rollout workers: own streams, slots, LoRA slots, rows
    fleet.py         starts, kills and stops rollout workers
    links.py         simulates how versions travel: from the store, or along chains
    world.py         simulates the cluster around one owner
    pool/            simulates many base models on pools of workers, by traces of months
    spikes/          simulates spikes of requests on pools that start workers in several ways
    report.py        prints tables and goals, and declares options; the benchmarks use it too
"""
