"""`python -m examples.largest_env.server.app --port 8001` serves the environment."""

# pyright: reportMissingImports=false

import argparse

import uvicorn
from openenv.core.env_server.http_server import create_app

from examples.largest_env.models import LargestAction, LargestObservation
from examples.largest_env.server.largest_environment import LargestEnvironment

MAX_SESSIONS = 256

app = create_app(
    LargestEnvironment, LargestAction, LargestObservation, env_name="largest_env", max_concurrent_envs=MAX_SESSIONS
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001)
    args = parser.parse_args()
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
