"""The user's half of the command line `marlaas`: arguments come in, calls to the HTTP API go out, tables or JSON are printed.

    main ─► submit, jobs, watch, chat, ... ─► Client ─► HTTP API

Its files:

    main.py           gathers the commands, and turns errors into exit statuses
    options.py        declares what all commands share: where the API is, which key opens it
    output.py         prints JSON for scripts, tables for people
    submit.py         `submit`: uploads the files, and creates a job
    jobs.py           `jobs`, `events`, `logs`, `cancel`, `pause`, `resume`
    watch.py          `watch`: shows jobs and workers, live
    view.py           draws the live tables, and lines of events
    progress.py       gathers what is known of a running job from its events
    pull.py           `pull`: downloads an adapter
    environments.py   `env list`, `env check`: which environments there are, and how one plays
    account.py        `usage`, `ledger`
    receivers.py      `loggers`, `webhooks`: where jobs report to
    samples.py        `samples`: shows whole conversations
    chat.py           `chat`: talks to a model
    talk.py           holds a conversation through the `openai` client
    models.py         `models`: the base models, and your tuned ones
"""
