"""Computes log-probs of trained tokens through the frozen base model, differentiable in each row's own adapter.

    sequences, adapters ─► Backbone.logprobs ─► float32 [M] ─ losses ─ backward ─► gradients in the adapters' stacks

What a loss, a step or an optimiser is, is not known here; how a base model computes is known nowhere else in the trainer.

Its files:

    interface.py   the protocol `Backbone`, and what goes through it in one pass
    sequences.py   the CPU's backbone: our own decoder, a padded sequence each, the same bits in any company
    projection.py  the decoder's linear layers, with an adapter for each sequence
    head.py        log-probs of targets from hidden states, without all scores at once
"""
