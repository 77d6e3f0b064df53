"""Makes the secrets of a docker-compose cluster, unless they are there: python -m deploy.make_secrets

    .env.cluster             (0600) passwords and settings, for docker compose's --env-file
    .cluster/                (0700) what the containers mount; its content is readable inside them, and here by you alone
        redis/users.acl      Redis' users, with hashes of those passwords
        keys/api_key, keys/admin_key

users.acl is written anew from .env.cluster each time: change REDIS_<USER>_PASSWORD or MARLAAS_BASE_MODELS there, run this
again, and have Redis read it with ACL LOAD. While REDIS_<USER>_OLD_PASSWORD stands there too, both are valid.
It needs Python alone, no package.
"""

import os
import secrets
from pathlib import Path

from deploy.acl import USERS, acl_file

ENV_FILE, FOLDER = Path(".env.cluster"), Path(".cluster")
TEMPLATE = """\
# Secrets and settings of the docker-compose cluster. Not to be committed.

# Where objects are kept. The default is the store of docker-compose.yml, on a volume of this machine, with one key for all. To use
# another S3 service, give each service a key of its own (docs/operations.md) and start with --scale store=0.
MARLAAS_STORE_URL=s3://marlaas/cluster
AWS_ENDPOINT_URL=http://store:9000
AWS_REGION=us-east-1
{store_keys}

# name=/models/folder, comma-separated; the folders lie in MODELS_DIR
MARLAAS_BASE_MODELS=tiny
MODELS_DIR=./models
# hosts that `endpoint` graders may call
MARLAAS_ENDPOINT_HOSTS=
# hosts whose models `score_model` and `label_model` may ask, and the keys for them: https://api.example.org=sk-...
MARLAAS_GRADER_HOSTS=
MARLAAS_GRADER_KEYS=
# hosts of W&B servers that tenants' figures may be sent to, such as api.wandb.ai, and hosts that their webhooks may be at
MARLAAS_LOGGER_HOSTS=
MARLAAS_WEBHOOK_HOSTS=
# a folder on a disk of Redis' own, in place of the volume `redis`: the store may fill the other
REDIS_DATA=
REDIS_MAXMEMORY=1gb
# limits of the containers: Redis' own twice the line above, for it takes more while it rewrites its file; an env worker's
# MARLAAS_SANDBOX_PROCESSES + 1 times MARLAAS_SANDBOX_MEMORY_MB, and 1.5gb more. docker-compose.yml has those of the others
REDIS_MEMORY=2gb
ENV_MEMORY=4gb
REDIS_VERSION=7
# where the API is published; several managers need a range: 127.0.0.1:8000-8009
PUBLISH=127.0.0.1:8000

{passwords}
"""


def main() -> None:
    make_folder()
    if not ENV_FILE.exists():
        write(ENV_FILE, new_settings(), mode=0o600)
    settings = read_settings(ENV_FILE.read_text())
    passwords = {user: valid_passwords(settings, user) for user in USERS}
    bases = [part.partition("=")[0].strip() for part in settings["MARLAAS_BASE_MODELS"].split(",")]
    version = int(settings.get("REDIS_VERSION", "7"))
    write(FOLDER / "redis" / "users.acl", acl_file(passwords, bases, redis_version=version), mode=0o644)
    for name in ("api_key", "admin_key"):
        if not (FOLDER / "keys" / name).exists():
            write(FOLDER / "keys" / name, f"sk-{secrets.token_urlsafe(32)}\n", mode=0o644)


def make_folder() -> None:
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    FOLDER.chmod(0o700)
    for name in ("redis", "keys"):
        (FOLDER / name).mkdir(exist_ok=True)
        (FOLDER / name).chmod(0o755)


def new_settings() -> str:
    key = {part: secrets.token_hex(16) for part in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    keys = [
        f"{service}_AWS_{part}={value}"
        for service in ("MANAGER", "EXPORTER", "ENV", "ROLLOUT", "TRAINER")
        for part, value in key.items()
    ]
    passwords = [f"REDIS_{user.upper()}_PASSWORD={secrets.token_hex(24)}" for user in USERS]
    return TEMPLATE.format(store_keys="\n".join(keys), passwords="\n".join(passwords))


def valid_passwords(settings: dict[str, str], user: str) -> list[str]:
    """Raises KeyError if the user has none."""
    name = f"REDIS_{user.upper()}"
    return [settings[f"{name}_PASSWORD"], *filter(None, [settings.get(f"{name}_OLD_PASSWORD")])]


def read_settings(text: str) -> dict[str, str]:
    """NAME=value lines; comments and empty lines are left out."""
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name: value for name, _, value in pairs}


def write(path: Path, text: str, *, mode: int) -> None:
    """Writes a file that has its mode from the beginning, and keeps its inode, for containers mount it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)


if __name__ == "__main__":
    main()
