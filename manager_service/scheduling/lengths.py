"""Estimates the tokens of a job's trajectories under way, or of a supervised job's examples, from those that settled lately."""

import math

from common.wire.messages import ScoredTrajectory

SMOOTHING = 0.05
"""Weight of the newest trajectory in the moving averages."""


class Lengths:
    """Moving averages over a job's settled trajectories, in tokens. They begin with one turn of full length."""

    def __init__(self, max_tokens: int, max_context: int | None = None) -> None:
        """`max_tokens`: the longest answer of one turn. `max_context`: the longest trajectory; None: what is served."""
        self._max_tokens = max_tokens
        self._max_context = max_context or math.inf
        self.tokens = float(max_tokens)
        """Tokens that a trajectory prefills and samples, the prompt counted in every turn. Fairness charges these."""
        self._before_turn = 0.0

    @property
    def kv_tokens(self) -> float:
        """Keys and values that an engine sets aside for a turn: for the tokens before it, and for its longest answer."""
        return min(self._before_turn + self._max_tokens, self._max_context)

    def learn_example(self, message: ScoredTrajectory) -> None:
        """Takes in the length of an example; a rollout worker that measures one prefills all of it. One that failed has none."""
        if length := len(message.transcript):
            self._before_turn += (SMOOTHING if self._before_turn else 1.0) * (length - self._before_turn)
            self.tokens = self.kv_tokens

    def learn(self, message: ScoredTrajectory) -> None:
        usage = message.usage
        self.tokens += SMOOTHING * (usage.prompt_tokens + usage.sampled_tokens - self.tokens)
        before = message.num_prompt if message.num_turns <= 1 else len(message.transcript)
        self._before_turn += SMOOTHING * (before - self._before_turn)
