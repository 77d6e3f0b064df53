"""The Tinker protocol, as the `tinker` SDK speaks it: beside OpenAI's, over the same runs, workers and tenants.

    SDK ─► routes ─┬─ a run's operations ─► store ─► ops:<p> ─► the owner (runs/) ─► trainers
                   │       results ◄─ futures ◄─ done, results:<run> ◄─┘
                   └─ requests for samples ─► futures/samples ─► rollout

Its files:

    wire/           what is said, as bytes and as our own values
    store/          records in Redis: sessions, runs, samplers, operations
    futures/        results that clients wait for
    rest/           what there is: runs, checkpoints, sessions
    parts.py        gives each route the protocol's records
    requests.py     declares the JSON bodies
    names.py        says what names mean: base models, paths, samplers, futures
    sessions.py     serves a client as a whole: configuration, session, capabilities
    runs.py         serves a run as a whole: create_model, load_weights, get_info, unload_model
    operations.py   serves a run's operations: forward_backward, optim_step, saves
    samplers.py     serves samplers, and requests for samples
    retrieval.py    serves futures: retrieve_future, cancel_future
"""
