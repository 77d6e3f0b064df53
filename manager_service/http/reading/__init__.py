"""Reads what tenants send: bytes come in; checked values, token ids and counts go out, and the event loop never stops for long.

    bodies, file_store, job_checks, sampling/ ─ a task ─► reading_helpers ─┬─ small ─► here
                                                                           └─ large ─► process (two, fair between tenants)

Its files:

    bodies.py           reads the JSON bodies of requests
    process.py          the loop of a helper process
    tasks.py            the tasks, and what each does
    adapter_uploads.py  checks adapters that tenants upload
    item_lines.py       checks lines of items
    json_values.py      parses JSON strictly
    reading_helpers.py  does small tasks here, and large ones in helper processes
"""
