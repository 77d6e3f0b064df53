"""Child processes: started, kept running, asked, and ended with whoever started them.

    supervisor ─► processes ─► forking ─► prefork (has imported what services need) ─► a service            helpers ─► a helper process

Who dies with whom, by the kernel (Linux), also where the first is killed with SIGKILL:

    the thread that started it ─► an executed child, a helper, a prefork server ─► the children that it forked
    a child that ends ─► its session, which is all that it started itself: its supervisor kills it

Its files:

    processes.py   keeps one child process running
    child.py       runs a command that dies with the process that started it
    forking.py     starts children by forking, where that can be
    prefork.py     a process that has imported what services need, and forks them
    helpers.py     asks helper processes, and runs one
    own_folder.py  keeps temporary files that vanish with their process, or with the next one
"""
