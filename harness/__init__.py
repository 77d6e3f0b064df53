"""Parts with which tests and benchmarks drive a cluster. No service imports them.

live.py            a whole cluster of real processes, and its tenants' view of it through the HTTP API
processes.py       processor time and memory of processes, as the kernel counts them
redis_server.py    a real redis-server of its own, which its user may kill and start again
standin.py         stand-in workers: real worker loops and real messages around handlers that compute next to nothing
standin_load.py    the same as a process of its own that answers after a delay: as much load as a benchmark asks for
"""
