"""Checks, before anything is queued, that env workers may call the hosts that a job names, by what they announce."""

from collections.abc import Collection, Mapping
from typing import Any

import httpx

from common.errors import InvalidInput
from common.outgoing import AllowedHosts, NotAllowed
from common.suggestions import did_you_mean, quoted
from common.tasks.environments import LIVE, OpenEnvArgs, grader_in, parse_args
from common.tasks.graders import outside_urls
from common.wire.messages import EnvSpec, Outside


def check_outside(env: EnvSpec, announced: Collection[Outside], *, param: str) -> None:
    """Checks a valid environment against all workers, since it goes to any. `param`: its grader's. Raises InvalidInput."""
    args = parse_args(env) if env.name in LIVE else None
    if isinstance(args, OpenEnvArgs):
        for worker in announced:
            _check_openenv(args, worker, "method.reinforcement.environment.args")
    elif grader := grader_in(env):
        check_grader_hosts(grader, announced, param=param)


def check_grader_hosts(grader: Mapping[str, Any], announced: Collection[Outside], *, param: str) -> None:
    """The same of a valid grader."""
    for place, kind, url in outside_urls(grader):
        where = ".".join(filter(None, [param, place, "url"]))
        for worker in announced:
            if kind == "endpoint":
                check_host(url, worker.endpoint, where, "MARLAAS_ENDPOINT_HOSTS")
            else:
                check_host(url, worker.grader, where, "MARLAAS_GRADER_HOSTS")


def _check_openenv(args: OpenEnvArgs, worker: Outside, param: str) -> None:
    if args.url:
        check_host(args.url, worker.openenv, f"{param}.url", "MARLAAS_OPENENV_HOSTS")
    elif args.server not in worker.openenv_servers:
        hint = did_you_mean(args.server, worker.openenv_servers)
        raise InvalidInput(
            f"there is no OpenEnv server {quoted(args.server)} here{hint}; MARLAAS_OPENENV_SERVERS names them",
            param=f"{param}.server",
        )


def check_host(url: str, hosts: str, param: str, setting: str) -> None:
    """Raises InvalidInput unless the operator allows a valid URL's host. `hosts`: see `common.outgoing`."""
    try:
        AllowedHosts(hosts).check_name(httpx.URL(url))
    except NotAllowed as error:
        raise InvalidInput(
            f"{param}: {error}; {setting} lists the hosts that it allows", param=param, code="host_not_allowed"
        ) from error
