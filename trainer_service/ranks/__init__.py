"""Several processes of one trainer, its ranks, each with a part of the base model and its own device.

    Trainer ─► RankedBackbone ─ a command to all ─► split ─► each rank's share of the sequences ─► log-probs, gradients ─► the first rank

The first rank is the worker on the bus. Only it knows messages, losses, steps and optimisers; the others know a `Backbone`,
the adapters of open batches, and gradients of their own shares. Why: docs/decisions/ranks.md.

    backbone.py    the base model as the first rank's trainer sees it
    leader.py      starts the other ranks, and ends the trainer with one of them
    __main__.py    one of the other ranks
    commands.py    what the first rank tells the others, as bytes
    group.py       what ranks do together: meet, load, split a micro-batch, collect, add up
"""
