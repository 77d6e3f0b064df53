"""The HTTP API: a request comes in; a record for an owner, or an answer read from Redis, goes out. It never imports owner/.

    HTTP ─► app ─► a route of openai/, tinker/ or operators/ ─► stores/ ─► a record in Redis ─► the owner
                                                            └─► sampling/ ─► the same workers as training

Its files:

    reading/          reads what tenants send, without stopping the event loop
    sampling/         chat and text completions
    app.py            makes the application: routes, limits, the OpenAPI document
    server.py         makes the parts behind the routes, and serves them
    context.py        gives each route the manager's parts, and says who is calling
    errors.py         shows errors in OpenAI's shape
    connections.py    closes connections that send no request, give no key or read no answer
    body_limit.py     asks for the key before it reads a body; limits the size of bodies
    open_requests.py  limits how many requests of a tenant are open at once
    schemas.py        declares the objects that the API answers with
    event_stream.py   sends server-sent events
    quota.py          counts what tenants use, and holds them to their daily quota
    openai/           OpenAI's API: jobs, files, models, graders
    operators/        tenants, workers, metrics, health; the web page
    stores/           finds jobs, runs and versions in Redis, and creates them
    tinker/           the Tinker protocol
"""
