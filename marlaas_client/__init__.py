"""The client of MARLaaS: what OpenAI's SDK lacks for it, and the user's half of the command line. It imports nothing of the
services, so that it can live in a user's own environment.

    from marlaas_client import Client

    client = Client()               # MARLAAS_URL and MARLAAS_API_KEY, or the service that runs in this folder
    job = client.submit("items.jsonl", grader="string_check:answer", hyperparameters={"max_steps": 20})
    for event in client.follow(job["id"]):
        print(event["message"])
    client.openai.chat.completions.create(model=client.job(job["id"])["fine_tuned_model"], messages=[...])

    arguments ─► cli ─► Client ─► HTTP API

Its files:

    client.py         calls the HTTP API
    records.py        types what the API answers
    submission.py     makes a job's grader and files
    dataset.py        makes lines of tables and of Hugging Face datasets
    adapters.py       unpacks adapters into folders
    place.py          finds where the API is, and which key opens it
    cluster_file.py   reads and writes `cluster.json`, which tells where a running cluster is
    errors.py         the errors
    cli/              the command line
"""

from marlaas_client.adapters import Pulled
from marlaas_client.client import Client
from marlaas_client.errors import ClientError, InvalidInput, JobFailed, Refused, Unavailable
from marlaas_client.records import Event, Job, Ledger, Sample

__all__ = [
    "Client",
    "ClientError",
    "Event",
    "InvalidInput",
    "Job",
    "JobFailed",
    "Ledger",
    "Pulled",
    "Refused",
    "Sample",
    "Unavailable",
]
