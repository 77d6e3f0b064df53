"""Routes for operators, and the web page.

Its files:

    admin.py           serves tenants and keys to the operator
    cluster_routes.py  serves workers, timeline and dead letters
    health.py          answers /healthz and /readyz
    metrics.py         writes Prometheus' text format
    page_routes.py     serves the web page, which is in manager_service/http/page, and the OpenAPI document
"""
