"""Many bases on pools of workers, simulated: a trace of jobs comes in, the figures of four placements go out.

    trace ─► cluster: jobs ⇄ places: pool workers that switch by production's `choose` and `place` ─► figures, picture

Its files:

    __main__.py      runs a trace under each placement, and compares with PlexRL's figures
    cluster.py       simulates jobs and pools
    figures.py       computes the figures of a run
    picture.py       draws who used which device
    places.py        simulates pool workers
    trace.py         draws, reads and writes traces
"""
