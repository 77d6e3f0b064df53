"""Computes log-probs of trained tokens through the frozen base model, differentiable in each row's own adapter.

    sequences, adapters ─► Backbone.logprobs ─► float32 [M] ─ losses ─ backward ─► gradients in the adapters' stacks

This folder knows no losses, steps or optimisers; nothing else in the trainer knows how a base model computes.

Its files:

    choice.py      chooses a backbone by the settings and the base model, and loads it
    interface.py   the protocol `Backbone`, and what goes through it in one pass
    sequences.py   the CPU's backbone: our own decoder, a padded sequence each, the same bits in any company
    projection.py  the decoder's linear layers, with an adapter for each sequence
    modules.py     the backbone of devices: transformers' own modules, rows packed without padding
    sharding.py    spreads their weights over several processes
    shortage.py    ends a pass of several processes in step when memory runs out on one
    loading.py     loads a base model into them, and compares them with transformers
    attention.py   attention over packed sequences
    grouped.py     linear layers with the adapters of packed tokens
    head.py        log-probs of targets from hidden states, without all scores at once
    device_kernels/  kernels for CUDA in their place
"""
