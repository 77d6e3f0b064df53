"""The loop of every worker: it reads messages, has its service's handler work on them, and settles what is finished.

    bus ─ entries ─► worker ─► handler ─ messages ─► settler ─► bus           takeover ◄─ entries of workers that died

A worker renews the entries that it works on. When it dies, takeover.py of another finds them after a lease (10 s) and works on them.
On its second delivery an entry runs beside others. From the third it runs alone, unless the worker before it saved progress; from the
sixth, always. The job's owner hears nothing of workers that die until the tenth delivery has failed too. Then the entry becomes a dead
letter, and the job gets a failed trajectory, which its group leaves out. When an env worker is gone, env_service/live/ moves the entries
of its own stream, which were for its live sessions, to the stream that all env workers read.

Its files:

    handlers.py    declares what a service is to its worker
    membership.py  lets workers join a cell only if they compute the same bits as the others
    service.py     starts a worker service
    settler.py     settles finished deliveries, many by one script
    takeover.py    takes over the entries that other workers left behind
    telemetry.py   tells once a second what a worker does
    underway.py    keeps the deliveries that a worker works on
    worker.py      runs a worker: reads messages, works on them, tries again, gives up, hands back
"""
