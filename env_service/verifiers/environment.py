"""The live environment of a package for `verifiers`. An operator subclasses it for each package that jobs may name:

    class Addition(Verifiers):
        python = "/srv/environments/addition"       # an interpreter, or the folder of a Python environment
        taskset = "addition"                        # verifiers.v1; or, up to verifiers 0.3, environment = "addition"
        args = {"largest": 99}
        job_args = ("largest",)

and makes it known under the entry point group `marlaas.environments`. Jobs name no module and no class: they choose among what the
operator installed, and set the arguments in `job_args`, no others.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, create_model

from common.errors import InvalidInput
from env_service.failures import EnvironmentFailed
from env_service.verifiers.package_process import Hosts
from env_service.verifiers.session import VerifiersSession


class Verifiers:
    """Implements `LiveEnvironment`. An item is `{"task": place}` of a row in a training file, or made, for chance to choose the task."""

    python: ClassVar[str]
    """The interpreter, or the folder of the Python environment, in which the package and `verifiers` are installed."""
    taskset: ClassVar[str] = ""
    """The name of a taskset for `verifiers.v1` (0.4 on). It is played with token ids."""
    environment: ClassVar[str] = ""
    """The name that `load_environment` takes (verifiers up to 0.3). It is played with chat completions."""
    args: ClassVar[Mapping[str, Any]] = {}
    """The fields of the taskset's configuration, or the arguments of `load_environment`."""
    job_args: ClassVar[Sequence[str]] = ()
    """The part of `args` that jobs may give. Name none that can hold a path or the name of a module."""
    env: ClassVar[Mapping[str, Any]] = {}
    """`verifiers.v1`: the rest of the environment's configuration, such as its agent's harness and runtime."""
    renderer: ClassVar[Mapping[str, Any] | None] = None
    """`verifiers.v1`: the configuration of the renderer; None: the one that fits the base model's name, or else its chat template."""
    variables: ClassVar[Sequence[str]] = ()
    """Names of variables of the env worker's that the package needs, such as a judge's key. Its process has no others but those that
    `process.py` lists."""
    reply_roles: ClassVar[Sequence[str]] = ()
    """Roles of the messages that the environment answers with: a base model that cannot show them is then refused at once."""
    Args: ClassVar[type[BaseModel]]

    hosts: Hosts
    """The worker's, which sets it."""
    base: Path
    """The folder of the base model, whose tokenizer `verifiers.v1` needs. The worker sets it."""

    def __init_subclass__(cls) -> None:
        fields: dict[str, Any] = dict.fromkeys(cls.job_args, (Any, None))
        cls.Args = create_model(f"{cls.__name__}Args", __config__=ConfigDict(extra="forbid"), **fields)

    def __init__(self, **args: Any) -> None:
        if bool(self.taskset) == bool(self.environment):
            raise InvalidInput(f"{type(self).__name__} must name a taskset or an environment, one of them")
        self._load = self._load_with({**self.args, **args})

    def make_item(self, seed: int, held_out: bool) -> dict[str, Any]:
        return {"seed": seed, "held_out": held_out}

    async def open(self, item: dict[str, Any], seed: int) -> VerifiersSession:
        load = self._load | ({"tokenizer": str(self.base.resolve())} if self.taskset else {})
        conversation = await self.hosts.begin(self.python, load, _task_of(item), self.variables)
        with ExitStack() as unless_open:
            unless_open.callback(conversation.close)
            asked = await conversation.next()
            if "ends" in asked:
                raise EnvironmentFailed("the environment ended without asking its model anything")
            unless_open.pop_all()
        return VerifiersSession(conversation, asked, self.reply_roles)

    def _load_with(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The environment that `host.py` is told to load."""
        if self.environment:
            return {"environment": self.environment, "args": args}
        return {"config": {**self.env, "taskset": {"id": self.taskset, **args}}, "renderer": self.renderer}


def _task_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an item that the host needs. Raises InvalidInput."""
    if not ("task" in item or "seed" in item):
        raise InvalidInput('a row of the training file must name one of the environment\'s tasks: "task": 17')
    return {name: item[name] for name in ("task", "seed", "held_out") if name in item}
