"""`up`: run everything on this machine, in the foreground."""

import asyncio
import contextlib
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from manager_service.launcher.supervisor import LocalCluster
from manager_service.scheduling.elastic import WorkerRange
from manager_service.settings import ManagerSettings
from marlaas_client.cli.options import Json
from marlaas_client.cli.output import print_json, say, typed
from marlaas_client.place import ClientSettings

Rollouts = Annotated[
    str, typer.Option(metavar="N or MIN:MAX", help="Rollout workers; of a range as many as turns want.")
]
Count = Annotated[int, typer.Option(min=0, help="Number of workers, for all base models; of vLLM's for each.")]


def up(
    rollout: Rollouts = "1",
    env: Count = 1,
    trainer: Count = 1,
    port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="MARLAAS_PORT", help="On 127.0.0.1; 0: any free one.")
    ] = 8000,
    data: Annotated[Path | None, typer.Option("--data", help="Folder for everything that is kept.")] = None,
    as_json: Json = False,
) -> None:
    """Start Redis, the manager and the workers, and keep them running until Ctrl-C."""
    try:
        workers = WorkerRange.parse(rollout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rollout") from error
    cluster = LocalCluster(
        data_dir=data or ClientSettings().data_dir,
        rollout=workers,
        env=env,
        trainer=trainer,
        port=port,
        notify=lambda line: say(line, keep="\n", err=True),
    )
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(run_until_told(cluster, as_json=as_json))


async def run_until_told(cluster: LocalCluster, *, as_json: bool) -> None:
    """Runs until Ctrl-C or SIGTERM cancels it."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell starts what it puts behind without SIGINT
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    if not as_json:
        typer.echo(f"starting in {cluster.data_dir} …", err=True)
    async with cluster:
        _greet(cluster, as_json)
        await asyncio.Event().wait()


def _greet(cluster: LocalCluster, as_json: bool) -> None:
    folder, settings = cluster.data_dir, ManagerSettings()
    if as_json:
        return print_json({"url": cluster.base_url, "data": str(folder), "pids": cluster.pids})
    option = "" if folder == Path(".marlaas").resolve() else f" --data {shlex.quote(str(folder))}"
    typer.echo(
        f"MARLaaS is ready at {cluster.base_url}\n"
        f"  page    {cluster.base_url}/ shows the jobs; it asks for a key\n"
        f"  keys    {folder / 'api_key'} (yours), {folder / 'admin_key'} (tenants, /metrics)\n"
        f"  openai  base_url={cluster.base_url}/v1 api_key=$(cat {folder / 'api_key'})\n"
        f"  tinker  export TINKER_BASE_URL={cluster.base_url} TINKER_API_KEY=tml-$(cat {folder / 'api_key'})\n"
        f"  logs    {folder / 'logs'}\n"
        f"  policy  {settings.policy}\n"
        f"  next    in another terminal: {typed(Path(sys.executable).name)} -m examples.quickstart{option}, or\n"
        f"          {typed('marlaas')} submit ITEMS.jsonl --grader string_check:answer --watch{option}\n"
        f"          docs of the API: {cluster.base_url}/docs\n"
        "Ctrl-C stops everything."
    )
