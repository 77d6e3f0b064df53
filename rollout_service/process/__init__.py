"""The engine in a process of its own: requests come in, tokens go out, and turns survive that process's death.

    process_engine ─► lora_slots ─► Core.sample ─ chunks ─► turn ─► tokens
           ▲                            │
           └── the process died: start another, go on from the tokens so far

Its files:

    process_engine.py  runs turns over one core after another
    core.py            says what the engine needs of a process (a `Core` is one life of it)
    sleeping.py        puts the process to sleep, and finds out whether it wakes as it was
    turn.py            holds one turn: what it has, what is left, when it ends
    busy_clock.py      splits the process's time among turns
    adapter_files.py   writes adapters as PEFT folders, which the process loads
    lora_slots.py      gives adapters the process's slots in turn; keeps others in memory while there is room
    vllm_engine.py     runs vLLM; the only file that imports it
    vllm_guard.py      ends vLLM's processes together with the rollout worker
"""
