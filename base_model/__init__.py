"""The frozen base model with an adapter for each row: token ids and adapters in, scores out.

    ids ─► decoder ─ each linear layer + stacked (the rows' adapters) ─► scores        rollout and trainer share it

Its files:

    decoder.py  computes a decoder-only transformer as one function of its weights
    modules.py  loads a base model into transformers' modules, and refuses what they would compute differently
    stacked.py  computes adapter products for rows of different adapters
    adapter.py  loads, checks and saves the weights of one adapter version
    kernels.py  chooses kernels by which no row's bits depend on other rows
    device.py   finds a device and its free memory, lets workers load in turn, measures computing time
"""
