"""The engine in a process of its own: requests come in, tokens go out, and turns survive the death of that process.

    process_engine ─► [alone] ─► seat ─► lora_slots ─► Core.sample ─ chunks ─► turn ─► tokens
           ▲                                            │
           └── the process died: start another, go on from the tokens so far

Its files:

    process_engine.py  runs turns over one core after another
    core.py            says what the engine needs of a process (a `Core` is one life of it)
    turn.py            holds one turn: what it has, what is left, when it ends
    adapter_files.py   writes adapters as PEFT folders, which the process loads
    known_adapters.py  keeps adapters in the process's memory while there is room
    lora_slots.py      gives adapters the process's slots in turn
    busy.py            splits the engine's time evenly among the turns running at each moment
    vllm_engine.py     runs vLLM; the only file that imports it
    vllm_guard.py      ends vLLM's processes together with the rollout worker
    gate.py            lets turns pass together, and a suspect turn alone
"""
