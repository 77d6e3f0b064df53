"""Routes for operators, and the web page.

Its files:

    admin.py           serves tenants and keys to the operator
    cluster_routes.py  serves workers, timeline and dead letters
    docs_page.py       serves the OpenAPI document, also as a page
    health.py          answers /healthz and /readyz
    metrics.py         writes Prometheus' text format
    page_routes.py     serves the web page, which is in manager_service/page
"""
