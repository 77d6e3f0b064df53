"""What a job's trajectories have cost lately, to estimate what those under way will."""

from common.messages import ScoredTrajectory

SMOOTHING = 0.05
"""Weight of the newest trajectory in the moving averages."""


class Lengths:
    """Moving averages over a job's settled trajectories, in tokens. Before the first, a turn of full length is assumed."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: of a turn."""
        self._max_tokens = max_tokens
        self.tokens = float(max_tokens)
        """Prefilled and sampled, every turn's prompt again: what fairness charges."""
        self._before_turn = 0.0

    @property
    def kv_tokens(self) -> float:
        """Keys and values that an engine sets aside for a turn: all before it, and the longest that it may become."""
        return self._before_turn + self._max_tokens

    def learn(self, message: ScoredTrajectory) -> None:
        usage = message.usage
        self.tokens += SMOOTHING * (usage.prompt_tokens + usage.sampled_tokens - self.tokens)
        before = message.num_prompt if message.num_turns <= 1 else len(message.tokens)
        self._before_turn += SMOOTHING * (before - self._before_turn)
