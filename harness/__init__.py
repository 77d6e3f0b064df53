"""Parts with which tests and benchmarks drive a cluster. No service imports them.

bases.py           a base model with random weights, of any size
browser.py         finds a Chromium on the PATH
floods.py          calls that a tenant keeps under way, while others are measured
live.py            a whole cluster of real processes, and its tenants' view of it through the HTTP API
processes.py       processor time and memory of processes, as the kernel counts them
proxy.py           a TCP relay that can be shut, and that delays, halves or answers what passes
replaceable_redis.py   Redis behind a proxy, whose place a replica may take that lost a second
redis_server.py    a real redis-server of its own, which its user may kill and start again
s3_server.py       an S3 server of one's own over HTTP
standin.py         stand-in workers: real worker loops and real messages around handlers that compute next to nothing
standin_load.py    the same as a process of its own that answers after a delay: as much load as a benchmark asks for
light/             env and rollout workers for it that cost little; to Redis and the owners they are the ordinary ones
"""
