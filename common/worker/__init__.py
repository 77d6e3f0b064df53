"""The loop of every worker: it reads messages, has its service's handler work on them, and settles what is finished.

    bus ─ entries ─► worker ─► handler ─ messages ─► settler ─► bus           takeover ◄─ entries of workers that died

When a worker dies:

1. Its entries stay pending in Redis. While it lived it renewed those whose work advanced, three times in a lease (worker.py, `_renew`).
2. After a lease (10 s) without a renewal another worker finds them (takeover.py) and works on them, from the progress that is saved.
3. On its second delivery an entry runs together with others. From the third it runs alone, so that an entry which kills its worker harms
   no other, unless the last worker saved progress; from the sixth it always does.
4. After the tenth delivery it becomes a dead letter, and only then its job's owner hears of it: the job gets a failed trajectory, which
   its group leaves out.
5. If the first worker was not dead but slow, both finish. The script SETTLE (bus/scripts.py) publishes only the outputs of the first.

The entries of an env worker's own stream, for its live sessions, go to the stream of all env workers: env_service/live/ moves them.

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
