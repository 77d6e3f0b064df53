"""The manager decides: jobs, tenants, fairness, staleness, when a batch is full; and it answers the HTTP API."""
