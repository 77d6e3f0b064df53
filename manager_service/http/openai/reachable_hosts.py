"""Checks, before anything is queued, that env workers may call the hosts that a job names, by what they announce."""

from collections.abc import Collection, Mapping
from typing import Any, cast

import httpx

from common.errors import InvalidInput
from common.outgoing import AllowedHosts, NotAllowed
from common.suggestions import did_you_mean, quoted
from common.tasks.environments import BUILT_IN, LIVE, OpenEnvArgs, parse_args
from common.tasks.graders import outside_urls
from common.wire.messages import EnvSpec, Outside


def check_outside(env: EnvSpec, announced: Collection[Outside], *, param: str) -> None:
    """Checks a valid environment against all of them, since its trajectories go to any. `param`: where its grader is. Raises
    InvalidInput."""
    if env.name not in BUILT_IN:
        return
    args = parse_args(env) if env.name in LIVE else None
    grader: Any = env.args.get("grader")
    for worker in announced:
        if isinstance(args, OpenEnvArgs):
            _check_openenv(args, worker, "method.reinforcement.environment.args")
        elif isinstance(grader, Mapping):
            _check_grader(cast(Mapping[str, Any], grader), worker, param)


def _check_grader(grader: Mapping[str, Any], worker: Outside, param: str) -> None:
    for place, kind, url in outside_urls(grader):
        where = ".".join(filter(None, [param, place, "url"]))
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
    """Raises InvalidInput unless the operator allows the host of a valid URL. `hosts`: see `common.outgoing`."""
    try:
        AllowedHosts(hosts).check_name(httpx.URL(url))
    except NotAllowed as error:
        raise InvalidInput(
            f"{param}: {error}; {setting} lists the hosts that it allows", param=param, code="host_not_allowed"
        ) from error
