"""Workers that load the same base model serve together before any has the whole: each computes some of its layers.

    head: rows ─► its own layers ─ step ─► stage 1 ─ hidden states ─► head ─ step ─► stage 2 ─► … ─► head: scores, tokens
                                             has their keys and values of its layers

The head runs the ordinary rows over a `StagedDecoder`, without what is kept between turns. Once a loader is whole, or a stage is lost,
the head hands its rows back with their tokens.

Its files:

    member.py  a loader's part in it: serves its stage, or leads
    staged.py  the head's model: its own layers, and the others' over sockets
    stage.py   computes the layers of one stage for a head
"""
