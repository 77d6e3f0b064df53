"""Runs trajectories: Start and finished turns come in; next turns and scored trajectories go out.

    env ─ Start, TurnResult ─► handler ─► environment.step ─► [tool in the sandbox] ─┬─ next turn ─► rollout
                                                              grader ─► reward ──────┴─ the end ───► scored:<p>

Its files:

    environments/    the built-in environments, and how one is made
    graders/         rewards for answers
    live/            environments whose state cannot travel: their sessions stay with one env worker
    sandbox/         runs tenants' code
    verifiers/       runs packages for `verifiers`, in Python environments of their own
    __main__.py      starts one env worker
    settings.py      reads the settings of one env worker
    handler.py       turns a message into messages; makes each failure a value
    examples.py      shows the examples of supervised jobs, which nobody samples
    outputs.py       makes parts of the messages that go out: first requests, and ends
    conversation.py  reads what the model wrote, and renders what it is shown
    trajectory.py    packs what is remembered of a trajectory between its turns
    environment.py   declares what an environment is; installed environments import it
    failures.py      names why a trajectory has no reward
    work.py          counts the time of the piece of work at hand, and keeps it alive
"""
