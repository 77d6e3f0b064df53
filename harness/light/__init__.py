"""Stand-in workers that cost little, so that managers and Redis have the processor of a benchmark to themselves.

To Redis and to the owners each is `stand_in_worker` around a handler of `harness/standin.py`: it reads, renews, takes over, settles and
reports at the same pace, by the same commands and the same script, and what it publishes has the same bytes;
`tests/benchmarks/test_light_workers.py` holds the two together. It saves on its own side alone.

worker.py      the loop: work has one heap of ends instead of a task and a timer each
rollout.py     answers turns as `OneTurnRollout` does, but builds the answer from the request's bytes: it decodes and encodes nothing
env.py         begins trajectories as `OneTurnEnv` does: the turns of a group are one payload with another number in two places
"""
