"""OpenAI's API, with our extras: models, graders, environments, usage, where jobs report to.

Its files:

    files/              files: uploads and downloads
    jobs/               fine-tuning jobs
    adapter_content.py  serves the files of a tuned model, of a job or of a run
    environments.py     lists the environments that jobs may name
    grader_models.py    finds the models that answer for graders
    graders.py          tries a grader before a job depends on it
    models.py           lists base models and the tenant's tuned ones
    paging.py           pages through lists as OpenAI does
    reachable_hosts.py  checks that env workers may call the hosts that a job names
    receiver_routes.py  serves where a tenant's jobs report to: loggers' keys, webhooks
    usage_routes.py     tells what a tenant used
"""
