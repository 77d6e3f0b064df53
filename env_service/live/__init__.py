"""Environments whose state cannot travel: a trajectory's session stays with the env worker that opened it.

    Start ─► open ─► rollout ─► TurnResult ─► env:<worker> ─► the session's step ─► rollout ─► …
                                                  │ the worker is gone
                                                  └─► env ─► any worker: open, replay, step ─► rollout ─► …

Its files:

    trajectories.py  gives messages their slots, opens sessions and replays lost ones
    sessions.py      holds the sessions, and the places for them that tenants share
    registration.py  registers the worker, and passes on what lies in the streams of workers that are gone
"""
