"""The command line `marlaas`: arguments come in, calls to the HTTP API go out, tables or JSON are printed.

    main ─► submit, jobs, watch, chat, ... ─► client ─► HTTP API        up ─► manager_service.local

Its files:

    main.py       gathers the commands
    options.py    declares what all commands share: where the API is, which key opens it
    client.py     calls the HTTP API
    output.py     prints JSON for scripts, tables for people
    submit.py     `submit`: uploads the files, and creates a job
    dataset.py    reads tables and datasets as items
    jobs.py       `jobs`, `events`, `logs`, `cancel`, `pause`, `resume`
    watch.py      `watch`: shows jobs and workers, live
    view.py       draws the live tables, and lines of events
    progress.py   gathers what is known of a running job from its events
    pull.py       `pull`: downloads an adapter
    merge.py      merges an adapter into its base model
    account.py    `usage`, `ledger`
    samples.py    `samples`: shows whole conversations
    chat.py       `chat`: talks to a model
    talk.py       holds a conversation through the `openai` client
    models.py     `models`: the base models, and your tuned ones
    plan.py       `plan`: says what of a base model fits on a device
    operate.py    `workers`, `dead`: for operators
    up.py         `up`: runs everything on this machine
"""
