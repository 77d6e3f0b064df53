"""Finds or makes the environment that a message names: built in, or installed by the operator."""

from collections import OrderedDict
from pathlib import Path

import msgspec

from common.errors import InvalidInput
from common.tasks.environments import (
    BUILT_IN,
    LIVE,
    SUPERVISED,
    CalculatorArgs,
    OpenEnvArgs,
    PythonArgs,
    SearchArgs,
    SingleTurnArgs,
    grader_of,
    load_installed,
    parse_args,
)
from common.wire.messages import EnvSpec
from env_service.environment import Environment, LiveEnvironment
from env_service.environments.openenv import OpenEnv
from env_service.environments.openenv_server import Servers
from env_service.environments.text_collections import Collections
from env_service.environments.tool_loop import SingleTurn, ToolLoop
from env_service.environments.tools import Calculator, Search, python_tool
from env_service.graders.endpoint import Endpoints
from env_service.graders.runner import GraderRunner
from env_service.sandbox.sandbox import Sandbox
from env_service.verifiers.environment import Verifiers
from env_service.verifiers.package_process import Hosts

MAX_CACHED = 64

AnyEnvironment = Environment | LiveEnvironment


class Catalogue:
    """Makes environments, and keeps those in use. `close` when done."""

    def __init__(
        self,
        *,
        graders: GraderRunner,
        sandbox: Sandbox,
        collections_dir: Path | None = None,
        openenv: Servers | None = None,
        base_dir: Path = Path(),
        hosts: Hosts | None = None,
    ) -> None:
        """`openenv`: the servers that jobs may use. `base_dir`: of the base model. `hosts`: processes of packages."""
        self._graders = graders
        self._openenv = openenv or Servers(Endpoints(""))
        self._sandbox = sandbox
        self._collections = Collections(collections_dir)
        self._hosts = hosts or Hosts()
        self._base_dir = base_dir
        self._made: OrderedDict[bytes, AnyEnvironment] = OrderedDict()

    async def close(self) -> None:
        await self._collections.close()
        await self._hosts.close()

    def get(self, spec: EnvSpec) -> AnyEnvironment:
        """Raises InvalidInput if there is no such environment, or if it refuses its arguments."""
        key = msgspec.msgpack.encode(spec)
        if key not in self._made:
            self._made[key] = self._make(spec)
        self._made.move_to_end(key)
        while len(self._made) > MAX_CACHED:
            self._made.popitem(last=False)
        return self._made[key]

    def is_live(self, spec: EnvSpec) -> bool:
        """Do its trajectories have sessions? False also for one that cannot be made: `get` says why."""
        if spec.name in (*BUILT_IN, SUPERVISED):
            return spec.name in LIVE
        try:
            return isinstance(self.get(spec), LiveEnvironment)
        except (Exception, SystemExit):  # foreign code: `get` makes its error a value
            return False

    def _make(self, spec: EnvSpec) -> AnyEnvironment:
        if spec.name not in BUILT_IN:
            return self._made_ready(_make_installed(spec))
        grader, args = grader_of(spec), parse_args(spec)
        if isinstance(args, OpenEnvArgs):
            return OpenEnv(args, self._openenv)
        assert grader is not None
        match args:
            case CalculatorArgs():
                return Calculator(args, grader, self._graders)
            case SearchArgs():
                return Search(args, grader, self._graders, self._collections)
            case PythonArgs():
                return ToolLoop(python_tool(args, self._sandbox), grader, self._graders)
            case SingleTurnArgs():
                return SingleTurn(grader, self._graders)
            case _:
                raise AssertionError(f"a built-in environment without a case here: {spec.name}")

    def _made_ready(self, environment: AnyEnvironment) -> AnyEnvironment:
        if isinstance(environment, Verifiers):
            environment.hosts, environment.base = self._hosts, self._base_dir
        return environment


def _make_installed(spec: EnvSpec) -> AnyEnvironment:
    cls = load_installed(spec.name)
    try:
        return cls(**spec.args)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the environment {spec.name} refuses its args: {error}") from error
