"""The shortest use: upload a file, train an adapter on it, follow its events, talk to it. First: `make up`."""

import io
import json
from pathlib import Path
from typing import Any

from openai import OpenAI

from common.skills import generate


def main(folder: Path = Path(".marlaas")) -> None:
    """Prints rewards as they come, and the trained model's answer. `folder`: of the running cluster."""
    base_url = json.loads((folder / "cluster.json").read_text())["url"] + "/v1"
    client = OpenAI(base_url=base_url, api_key=(folder / "api_key").read_text().strip())
    rows = io.BytesIO("\n".join(map(json.dumps, generate("add", seed=0, n=256))).encode())
    file = client.files.create(file=("add.jsonl", rows), purpose="fine-tune")
    answer_is_right = {"type": "string_check", "name": "answer", "operation": "eq",
                       "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}  # fmt: skip
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=file.id,
        method={"type": "reinforcement", "reinforcement": {
            "grader": answer_is_right, "hyperparameters": {"max_steps": 20}}},  # pyright: ignore
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
    main()
