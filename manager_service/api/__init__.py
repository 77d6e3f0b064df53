"""The HTTP API: a request comes in; a record for an owner, or an answer read from Redis, goes out.

    HTTP ─► app ─► a route (one noun a file) ─► job_store, file_store, ... ─► Redis ─► the owner

Its files:

    reading/             reads what tenants send, without stopping the event loop
    sampling/            chat and text completions
    app.py               makes the application: routes, limits, the OpenAPI document
    server.py            makes the parts behind the routes, and serves them
    context.py           gives each route the manager's parts, and says who is calling
    errors.py            shows errors in OpenAI's shape
    connections.py       closes connections that send no request, give no key or read no answer
    body_limit.py        limits the size of request bodies
    key_first.py         asks for the key before it reads a body, and ends connections without one
    downloads.py         sends files of versions: a few at a time are made ready, and wait on disk for slow readers
    open_requests.py     limits how many requests of a tenant are open at once
    leaving.py           ends what is done for clients that leave
    places.py            shares a number of places among tenants
    schemas.py           declares the objects that the API answers with
    paging.py            pages through lists as OpenAI does
    jobs.py              serves jobs: create, list, retrieve, cancel, pause, resume
    submission.py        checks a new job, and makes its JobSpec
    starts.py            finds what a new job starts from
    hyperparameters.py   checks a job's hyperparameters, and makes them what the job uses
    estimates.py         says what a new job would need, and when a running one ends
    job_store.py         reads jobs, and creates them by one script
    job_records.py       reads what a job has written, from Redis or the archive
    events.py            serves a job's events, also as a stream
    event_stream.py      sends server-sent events
    results.py           serves what a job has made: checkpoints, metrics, adapters
    samples.py           serves what a job's steps were trained on, to read
    files.py             serves /v1/files
    tables.py            makes JSONL of uploads in other forms
    brought.py           checks adapters that tenants upload, and that they fit a base model
    file_store.py        checks files of items, and stores them
    adapters.py          serves the files of a tuned model, of a job or of a run
    models.py            lists base models and the tenant's tuned ones
    model_names.py       finds the adapter that a model's name means
    grader_models.py     finds the models that answer for graders
    environments.py      lists the environments that jobs may name
    graders.py           tries a grader before a job depends on it
    usage.py             tells what a tenant used
    page.py              serves the web page, which is in manager_service/page
    curves.py            serves the figures of a job's steps, in few points
    quota.py             counts what tenants use, and holds them to their daily quota
    feed.py              reads the streams that many requests wait for over one connection
    cluster.py           serves workers, timeline and dead letters
    receivers.py         serves where a tenant's jobs report to: loggers' keys, webhooks
    integrations.py      checks a job's loggers
    outside.py           checks that env workers may call the hosts that a job names
    admin.py             serves tenants and keys to the operator
    docs_page.py         serves the OpenAPI document, also as a page
    health.py            answers /healthz and /readyz
    metrics.py           writes Prometheus' text format
"""
