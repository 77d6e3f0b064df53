"""The shortest use: upload a file, train an adapter on it, follow its events, talk to it. First: `make up`.

python -m examples.quickstart [--data FOLDER] [--steps 20]      FOLDER: that of `marlaas up`, if it is not .marlaas
"""

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

from common.tasks.skills import generate
from marlaas_client.cluster_file import read_cluster_file


def main(folder: Path, steps: int) -> None:
    """Prints rewards as they come, and the trained model's answer. `folder`: of the running cluster."""
    running = read_cluster_file(folder)
    if running is None:
        sys.exit(f"no cluster runs on {folder}: start one with `make up`, or name its folder with --data")
    client = OpenAI(base_url=f"{running.url}/v1", api_key=(folder / "api_key").read_text().strip())
    rows = io.BytesIO("\n".join(map(json.dumps, generate("add", seed=0, n=256))).encode())
    file = client.files.create(file=("add.jsonl", rows), purpose="fine-tune")
    answer_is_right = {"type": "string_check", "name": "answer", "operation": "eq",
                       "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}  # fmt: skip
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id,
        method={"type": "reinforcement", "reinforcement": {
            "grader": answer_is_right, "hyperparameters": {"max_steps": steps}}},  # pyright: ignore
    )  # fmt: skip
    with client.fine_tuning.jobs.with_streaming_response.list_events(job.id, extra_query={"stream": "true"}) as events:
        for line in events.iter_lines():
            if line.startswith("data: {"):
                print(json.loads(line.removeprefix("data: "))["message"])
    model = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert model, "the job failed; its last event says why"
    question: Any = [{"role": "user", "content": "add 37+58"}]
    reply = client.chat.completions.create(model=model, temperature=0, messages=question)
    print("add 37+58 =", reply.choices[0].message.content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".marlaas"))
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    main(args.data, args.steps)
