"""The bus: Redis Streams with consumer groups, and the script that publishes results and acknowledges their cause.

    publish ─► stream ─► read ─► deliveries ─► settle: outputs first, then XACK and XDEL, in one script

Its files:

    bus.py               publishes, and acknowledges by one script
    deliveries.py        entries of streams as workers hold them, and dead letters
    fullness.py          measures how full Redis is
    histories.py         reads the histories that entries refer to
    payloads.py          makes fields of messages; large ones travel by way of object storage
    redis_connection.py  connects to Redis, packs commands in C, and tells errors that pass
    scripts.py           what Redis does for the bus in one go
    streams.py           names every key of a cell
"""
