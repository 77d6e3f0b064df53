"""The sandbox: a tenant's code and its input come in, its output or its error goes out.

    sandbox ─ starts ─► child (no network, no files, limits) ─ result ─► sandbox

Its files:

    sandbox.py          starts a process for each call, and ends it in time
    child.py            gives up what could do harm, then runs the code; its first process keeps watch
    calls.py            lists the calls to the kernel that the code may make
"""
