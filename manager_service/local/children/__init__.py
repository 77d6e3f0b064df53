"""The processes of a machine's cluster: started, kept running, and ended with whoever started them.

    supervisor ─┬─ child ─► a program, executed
                └─ nursery, which has imported the services ─► a service, forked

Its files:

    processes.py   keeps one child process running
    child.py       runs a command that dies with the process that started it
    forking.py     starts children by forking, where that can be
    nursery.py     a process that has imported what services need, and forks them
"""
