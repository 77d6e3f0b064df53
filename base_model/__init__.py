"""The frozen base model with an adapter for each row: token ids and adapters come in, scores go out.

    ids ─► decoder ─ each linear layer + stacked (the rows' adapters) ─► scores        rollout and trainer share it

Its files:

    decoder.py  computes a decoder-only transformer as one function of its weights, and says where it is the one to choose
    modules.py  loads a base model into transformers' own modules, and refuses what would be computed otherwise than meant
    stacked.py  computes adapter products for rows of different adapters
    adapter.py  loads, checks and saves the weights of one adapter version
    kernels.py  chooses how this machine multiplies, so that no bits depend on what is computed beside them
    device.py   finds a device and its free memory, lets workers load to it in turn, and measures computing time
"""
