"""The Tinker protocol, as the `tinker` SDK speaks it: next to OpenAI's, over the same runs, workers and tenants.

    SDK ─► routes ─┬─ a run's operations ─► stores ─► ops:<p> ─► the owner (runs/) ─► trainers
                   │       results ◄─ futures ◄─ done, results:<run> ◄─┘
                   └─ requests for samples ─► sample_futures ─► rollout

Its files:

    wire/              what is said, as bytes and as our own values
    futures/           results that clients wait for
    rest/              what there is: runs, checkpoints, sessions
    parts.py           gives each route the protocol's records
    operations.py      serves a run's operations: forward_backward, optim_step, saves
    retrieval.py       serves futures: retrieve_future, cancel_future
    request_bodies.py  declares the JSON bodies
    run_routes.py      serves a run as a whole: create_model, load_weights, get_info, unload_model
    sampler_routes.py  serves samplers, and requests for samples
    session_routes.py  serves a client as a whole: configuration, session, capabilities
"""
