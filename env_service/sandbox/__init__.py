"""The sandbox: a tenant's code and its input come in, its output or its error goes out.

    sandbox ─ asks ─► prepared process ─ forks ─► child (no network, no files, limits) ─ result ─► sandbox

Its files:

    sandbox.py          asks for a process for each call, and ends it in time
    prepared.py         imports what calls need, once, and forks
    child.py            gives up what could do harm, then runs the code; its first process keeps watch
    calls.py            lists the calls to the kernel that the code may make
"""
