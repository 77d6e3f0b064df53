"""One place of a service for several base models, which take turns: a process for each, of which one reads at a time.

    streams of all cells ─ LOOK ─► pool worker ─ Open, Close ─► base workers (forked out of it) ─► streams of their cells
                                        └─ ENTER ─► the cell: one entry wakes one worker

A cell's workers are those of `common/worker`; a gate says when they read. One base model alone needs none of this.

Its files:

    base_states.py   keeps what is known of each base model: where it is, what opening it costs
    base_workers.py  starts, opens, closes and ends the processes
    choosing.py      decides which base model a pool worker opens next
    gate.py          carries what a pool worker and a base worker say to each other
    looking.py       looks for work in all cells, and enters them in Redis
    pages.py         tells how much of a file is in memory
    placement.py     decides which pool workers each base model has its place on
    placing.py       tells the other pool workers what each base model needs, and computes the places from what all tell
    pool_worker.py   runs a place: looks, chooses, switches, reports
"""
