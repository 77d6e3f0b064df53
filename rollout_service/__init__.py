"""Generates turns: a TurnRequest comes in, a finished turn goes out. Many jobs share one base model, each with its adapter.

    rollout, rollout:* ─ TurnRequest ─► handler ─► adapters: hold its version ─► engine ─┬─ embedded/ (torch, here)
                                                                                             └─ process/ (vLLM)
    env, scored:<p>, reply:<api> ◄─ turn ── handler ◄──────────────── tokens, log-probs ──────────────┘

`sample` (embedded/sampler.py) draws tokens in `_draw`; `Batch._forward` (embedded/batch.py) calls it once a step,
for all rows. In process/, vLLM draws.

When a worker dies, its requests stay pending in the stream; after a lease (10 s) another worker takes them over
(`common/worker/takeover.py`). It continues a turn of more than 64 tokens from what was saved in the last second, and samples
other turns again, in deterministic mode all. When only an engine's process dies, process/ starts it again.

    embedded/     the engine in torch, in this process
    process/      the engine that runs in a process of its own
    __main__.py   starts one rollout worker
    settings.py   reads the settings of one rollout worker
    handler.py    answers a TurnRequest, with no bus and no retry
    engine.py     says what an engine must do
    turns.py      checks a request, finds stop strings, and keeps the turns under way, for every engine
    grammar.py    says which tokens may come next in a turn that follows a grammar
    adapters.py   loads adapters into the engine when a request names them, and drops unused ones
"""
