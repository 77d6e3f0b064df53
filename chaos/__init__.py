"""`make chaos`: a whole MARLaaS of real processes under a seeded stream of faults, while tenants' jobs run on it.

    start ─► calm: every job, undisturbed ─► storm: faults, and the same jobs again and again ─► drain ─► verify
             (its bytes and its pace)        (drawn from the seed alone)                                  (nothing lost,
                                                                                                       doubled or left)

    tenants, deserters ── HTTP ─► managers, workers ─┬─ link ─► Redis
                                                      └─ link ─► S3 server

A run has two acts, in deterministic mode and in default mode, on a cluster each.

    __main__.py    reads arguments, runs the acts
    act.py         runs one act from start to verdict
    cluster.py     starts the processes, and holds everything that a fault may strike
    clock.py       shifts the wall clock of one process
    faults.py      the table of faults, and how they are drawn
    inflict.py     applies and heals each kind of fault
    helpers.py     finds the processes that services start for tenants
    tenants.py     the jobs of four tenants, submitted again as they end, and a fifth tenant, whose clients are killed
    deserter.py    such a client, of the Tinker protocol, which never ends anything
    verify.py      the checks at the end
    report.py      prints faults, verdict, and time lost by cause
"""
