"""The loop of every worker: reads messages, has its service's handler work on them, and settles the results.

    bus ─ entries ─► worker ─► handler ─ messages ─► settler ─► bus           takeover ◄─ entries of workers that died

When a worker dies:

1. Its entries stay pending in Redis. It renewed those whose work advanced, three times in a lease (worker.py, `_renew`).
2. After a lease (10 s) without a renewal another worker takes them over (takeover.py), from the saved progress.
3. On its second delivery an entry runs together with others. From the third it runs with no others, so that an entry that
   kills its worker harms none, unless the last worker saved progress; from the sixth it always does.
4. After the tenth delivery it is a dead letter, and then its job's owner hears of it: the job gets a failed trajectory, which
   its group leaves out.
5. If the first worker was only slow, both finish. The script SETTLE (bus/scripts.py) publishes the first's outputs.

The entries of an env worker's own stream, for live sessions, go to that of all env workers: env_service/live/ moves them. Those of
a rollout worker's own streams: own_streams.py passes on what it had not read, and takeover.py looks for the others there.

Its files:

    handlers.py    declares what a service is to its worker
    membership.py  lets workers join a cell only if they compute the same bits as the others
    own_streams.py  passes on what waits for one worker alone, and finds workers that are gone
    service.py     starts a worker service
    settler.py     settles finished deliveries, many by one script
    takeover.py    takes over the entries that other workers left behind
    telemetry.py   tells once a second what a worker does
    underway.py    keeps the deliveries that a worker works on, and which jobs were cancelled, up to which epoch
    worker.py      runs a worker: reads messages, works on them, tries again, gives up, hands back
"""
