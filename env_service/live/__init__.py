"""Environments whose state cannot travel: a trajectory's session stays with the env worker that opened it.

    Start ─► open ─► rollout ─► TurnResult ─► env:<worker> ─► the session's step ─► rollout ─► …
                                                  │ the worker is gone
                                                  └─► env ─► any worker: open, replay, step ─► rollout ─► …

Its files:

    trajectories.py  gives messages their seats, opens sessions and brings them to the turn at hand
    sessions.py    holds the sessions, and the places for them that tenants share
    replay.py      brings a new session to where a lost one was
    registration.py  says that the worker is there, and gives to all what lies in the streams of those that are gone
"""
