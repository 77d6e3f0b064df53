"""Counts what an engine has done since its start, for telemetry and for predictions of its speed."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Meter:
    """Totals. Seconds are of the engine's thread, without waiting for a core; on a GPU, of the clock."""

    now: Callable[[], float]
    decode_steps: int = 0  # forwards of one token a row
    decode_rows: int = 0  # in them, those that only fill up a forward included
    decode_s: float = 0.0  # in them, sampling included
    prefill_tokens: int = 0  # computed before turns; what a group shares counts once
    prefill_positions: int = 0  # the same with padding
    prefill_s: float = 0.0
    later_turns: int = 0  # begun, the first ones of trajectories left out
    kv_hits: int = 0  # of these, how many found the keys and values of the turns before
    turns: int = 0  # ended
    sum_log_turn_tokens: float = 0.0  # over turns, of the logarithm of the tokens sampled, and of its square
    sum_squared_log_turn_tokens: float = 0.0

    def stepped(self, rows: int, seconds: float) -> None:
        self.decode_steps += 1
        self.decode_rows += rows
        self.decode_s += seconds

    def prefilled(self, tokens: int, positions: int, seconds: float) -> None:
        self.prefill_tokens += tokens
        self.prefill_positions += positions
        self.prefill_s += seconds

    def joined(self, turn: int, *, is_hit: bool) -> None:
        self.later_turns += turn > 0
        self.kv_hits += is_hit

    def ended(self, tokens: int) -> None:
        self.turns += 1
        log = math.log(max(1, tokens))
        self.sum_log_turn_tokens += log
        self.sum_squared_log_turn_tokens += log * log

    def counters(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items() if name != "now"}
