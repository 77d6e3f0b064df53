"""Keeps what a pool worker knows of each base model: where it is, what opening it costs, whether it can be opened here."""

import time
from dataclasses import dataclass, field

from common.errors import InvalidInput
from common.models.base_shape import BaseShape
from common.pool.base_workers import BaseWorker, averaged
from common.pool.choosing import WaitingBase
from common.pool.looking import Unread
from common.pool.pages import are_in_memory, read_ahead, weight_files
from common.settings import local_folder
from common.wire.reported import Tier

BYTES_A_SECOND: dict[Tier, float] = {"host": 1e9, "disk": 0.2e9, "away": 0.02e9}
"""Expected speed of loading, before it was measured here."""
START_S, SWITCH_S = 0.5, 0.02
"""Expected time until a process runs; and, at least, until a running one is open, apart from what the one before must end."""
OPERATION_S = 1.0
"""Expected time of one operation."""
PROCESS_BYTES = 100 << 20
"""Expected memory of a process besides weights and what its service adds."""
MAX_DEATHS, BANNED_S = 2, 600.0
"""A base model whose process ended so often in a row before it was open is not tried for so long."""
AGAIN_S = 60.0
"""Time until a base model that was refused, by its cell or by its settings, is tried again."""


@dataclass
class BaseState:
    name: str
    where: str
    itemsize: float
    """Bytes of a weight; 0: the service holds none."""
    sleeps: bool = False
    """Its closed process has given its weights back: what it says to need is not what it needs when it is open."""
    file_tier: Tier = "away"
    """The tier while it has no process."""
    num_bytes: int = 0
    """Memory of its process while it is closed, expected or as last told."""
    refused: str = ""
    """The reason why it cannot be opened here; empty if it can."""
    num_deaths: int = 0
    """Times in a row that its process ended before it was open."""
    closed_at_s: float = float("-inf")
    operation_s: float | None = None
    _loaded_s: dict[Tier, float] = field(default_factory=dict[Tier, float])
    _weight_bytes: int = 0
    _retry_at_s: float = float("-inf")

    def look(self) -> None:
        """Finds out where its files are. Reads the disk."""
        folder = local_folder(self.where)
        if folder is None or not self.itemsize:
            self.file_tier = "away" if folder is None else "host"
            return
        if not self.num_bytes:
            try:
                self._weight_bytes = int(BaseShape.load(folder).num_weights * self.itemsize)
                self.num_bytes = self._weight_bytes + PROCESS_BYTES
            except (InvalidInput, OSError):  # its process says what is wrong
                return
        self.file_tier = "host" if are_in_memory(weight_files(folder)) else "disk"

    def read_ahead(self) -> None:
        """Brings it from the disk into memory, some time."""
        if self.file_tier == "disk" and self.itemsize and (folder := local_folder(self.where)):
            read_ahead(weight_files(folder))

    def opening_s(self, *, is_loaded: bool) -> float:
        """Expected time to open it once it is its turn."""
        if is_loaded:
            return max(SWITCH_S, self._loaded_s.get("device", 0.0))
        known = self._loaded_s.get(self.file_tier)
        return START_S + self._weight_bytes / BYTES_A_SECOND[self.file_tier] if known is None else known

    def loaded(self, worker: BaseWorker, tier: Tier, seconds: float) -> None:
        """`tier`: of its files at the start, `seconds` ago."""
        self._loaded_s[tier], self.refused = averaged(self._loaded_s.get(tier), seconds), ""
        if not self.sleeps:
            self.num_bytes = max(worker.num_bytes, 1)

    def opened(self, seconds: float) -> None:
        """`seconds`: from being told to open until it read."""
        self._loaded_s["device"], self.num_deaths = averaged(self._loaded_s.get("device"), seconds), 0

    def failed(self, reason: str, *, died: bool) -> None:
        """Its process could not be loaded or opened."""
        self.num_deaths = self.num_deaths + 1 if died else 0
        if died and self.num_deaths < MAX_DEATHS:
            return
        if died:
            advice = f"look into this worker's log, and at the machine's memory; it is tried again in {BANNED_S / 60:.0f} minutes"
            return self.refuse(f"{reason}, {self.num_deaths} times: {advice}", BANNED_S)
        self.refuse(reason)

    def refuse(self, reason: str, seconds: float = AGAIN_S) -> None:
        self.refused, self._retry_at_s = reason, time.monotonic() + seconds

    @property
    def may_open(self) -> bool:
        return not self.refused or time.monotonic() >= self._retry_at_s

    def waiting(self, unread: Unread, worker: BaseWorker | None, mean_weight: float) -> WaitingBase:
        """`worker`: its base worker, if one is loaded."""
        return WaitingBase(
            base=self.name,
            waited_s=unread.waited_s,
            operation_s=self.operation_s or OPERATION_S,
            opening_s=self.opening_s(is_loaded=worker is not None),
            is_loaded=worker is not None,
            weight=unread.weight / mean_weight if unread.weight and mean_weight else 1.0,
            since_closed_s=time.monotonic() - self.closed_at_s,
        )
