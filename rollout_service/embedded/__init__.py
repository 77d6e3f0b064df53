"""The engine in torch: requests come in, tokens with log-probs go out, one step for all rows at a time.

    torch_engine ─ commands ─► batch: admit ─► prefill ─► step (backbone ─► sampler) ─► ended rows, new tokens ─► torch_engine
                                        row_states, pools: the rows under way          prefix: keys and values kept for later

Its files:

    torch_engine.py     runs the rows in a thread of its own
    batch.py            lets rows join, advance one token a step together, and leave
    row_states.py       keeps the state of each row under way, as arrays
    prefill.py          computes the keys and values that a turn needs before its first token
    prefix.py           keeps keys and values of prompts and of trajectories for later turns
    pools.py            holds the keys and values of the rows under way
    kv.py               computes attention on them
    sampler.py          draws tokens from scores, with exact log-probs
    meter.py            counts forwards, their rows, tokens and seconds
    selftest.py         checks that a turn's bits do not depend on what runs with it
    backbone/           computes the base model
    convoy/             computes it on several workers that load it, before any has the whole
    fault_isolation.py  does row by row what failed for several
"""
