"""The command line `marlaas`: the commands of users, from `marlaas_client.cli`, and those of operators.

    main ─► marlaas_client.cli        up ─► manager_service.launcher

Its files:

    main.py             gathers the commands; `workers`, `dead`: what the cluster does, with the admin key
    merge.py            `pull`, with the adapter merged into its base model
    up.py               `up`: runs everything on this machine
    plan_command.py     `plan`: says what of a base model fits on a device
    base_command.py     `base push`: brings a base model into the store
    tenants_command.py  `tenants`: weights, quotas and keys of the cluster's users
    example.py          `example`: runs one of the examples
"""
