"""The frozen base model with an adapter for each row: token ids and adapters come in, scores go out.

    ids ─► decoder ─ each linear layer + stacked (the rows' adapters) ─► scores        rollout and trainer share it

Its files:

    decoder.py        computes a decoder-only transformer as one function of its weights
    backbone_kind.py  chooses which of the two computes it, where the setting leaves it open
    modules.py        loads a base model into transformers' own modules, and refuses what would be computed otherwise than meant
    finite.py         refuses weights that are infinite or no numbers
    stacked.py        computes adapter products for rows of different adapters
    adapter.py        loads, checks and saves the weights of one adapter version
    kernels.py        chooses how this machine multiplies, so that no bits depend on what is computed beside them
    loading_turn.py   lets workers load to a GPU one after the other
    device.py         finds a device and its free memory, prepares a processor, and measures computing time
"""
