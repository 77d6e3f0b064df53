"""Fits a calibration of this machine and workload to the telemetry of a run.

    python -m simulator.calibrate --run DIR-or-URL [--keep FILE] > calibration.json

`--run`: the data folder of a running cluster, a `redis://` URL with `--base-model`, or a file that `--keep` wrote. Run jobs
first, best a few at once: what a forward costs for a row is seen only where the number of rows varies. Redis keeps the
telemetry of an hour, and all of it is used, so let nothing else run in that cluster.

By default decoding is counted in processor seconds, and the simulator lets all processes share `--cores`: right for a machine
with nothing else to do. With `--cores 0` it is counted by the clock, and what waited for a core in the run waits as long in
the simulation: right for a busy machine, and for one with cores or GPUs to spare.

Telemetry does not tell what manager and Redis use; `--control-us` is their processor time for a turn, as `python -m benchmarks.scale`
measures it.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec

from common.bus.bus import Bus
from common.bus.streams import Cell
from marlaas_client.cluster_file import read_cluster_file
from simulator.fit import Recording, calibrate, read_recording, record, write_recording
from simulator.report import natural, program


async def recording_of(run: str, base_model: str) -> Recording:
    """Raises ValueError if there is no cluster at `run`, and what Redis raises."""
    if Path(run).is_file():
        return read_recording(Path(run))
    url = run
    if not run.startswith(("redis://", "rediss://")):
        cluster = read_cluster_file(Path(run))
        if cluster is None:
            raise ValueError(f"no cluster runs on {run}: give the data folder of `marlaas up`, or a redis:// URL")
        url = cluster.redis_url
    bus = Bus.connect(url, Cell(base_model))
    try:
        return await record(bus)
    finally:
        await bus.close()


def main() -> None:
    options = argparse.ArgumentParser(
        prog=program(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--run", required=True, metavar="DIR-or-URL", help="see above")
    options.add_argument("--base-model", default="tiny", help="whose jobs ran; default tiny")
    options.add_argument("--keep", type=Path, metavar="FILE", help="write the telemetry there, to calibrate again")
    options.add_argument("--cores", type=natural, default=os.cpu_count(), help="that all processes share; 0: see above")
    options.add_argument(
        "--control-us", type=float, default=160.0, help="of manager and Redis, for a turn; default 160"
    )
    options.add_argument(
        "--name", default="measured", help="of the workload, as in the runs of --measured; default measured"
    )
    args = options.parse_args()
    try:
        recording = asyncio.run(recording_of(args.run, args.base_model))
        if args.keep:
            write_recording(recording, args.keep)
        calibration = calibrate(recording, cores=args.cores or None, control_s=args.control_us / 1e6, name=args.name)
    except ValueError as error:
        sys.exit(f"calibrate: {error}")
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(calibration), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
