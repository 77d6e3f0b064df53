"""Computes the base model for the rows of the embedded engine.

    tokens, positions, parts (attention and adapters) ─► EngineBackbone.forward ─► hidden states ─► logits

Its files:

    choice.py            chooses a backbone by the settings and the base model, and loads it
    interface.py         the protocol `EngineBackbone`, and the parts of a forward
    fused.py             our decoder, with few and large operations
    layout.py            places the rows of a forward of one token each
    captured.py          captures our decoder's steps in CUDA graphs
    decode_kernel.py     attention of such a step, as a Triton kernel
    modules.py           transformers' own modules, for the families that our decoder does not know, compared with transformers
    compiling.py         compiles what a CPU computes faster without torch, in a thread next to the engine
    compiled_kernels.py  attention of few new tokens, rotary embedding, random numbers, as numba compiles them
"""
