"""Settings of one manager process, read once at its start."""

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from common.settings import Bytes, Settings
from manager_service.records.sample_records import Limits
from manager_service.scheduling.elastic import WorkerRange
from manager_service.scheduling.policies import Policy, parse_policy


class ManagerSettings(Settings):
    """`MARLAAS_*` variables of only the manager; `common.settings` has those of every service."""

    model_config = SettingsConfigDict(env_prefix="MARLAAS_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    rollout_range: str = ""
    """The least and most rollout workers, which somebody starts and stops as `wanted` says: `marlaas up --rollout 1:4` sets it. Empty:
    their number is fixed. Off in deterministic mode."""
    repack: bool = True
    """A rollout worker whose turns the others have room for may retire. Off: only one without turns may."""
    policy: str = "marlaas"
    """The times at which jobs may sample and train: sequential, synchronous, naive, marlaas, bounded or bounded:ETA. See
    `manager_service.scheduling.policies`."""
    max_stored_bytes: Bytes = Field(default=16 << 30, ge=1)
    """Bytes that a tenant keeps in object storage, unless its record says otherwise."""
    max_open_requests: int = Field(default=1024, ge=1)
    """Requests of one tenant that are open at once on this manager, besides those for events."""
    inference_timeout_s: float = Field(default=120.0, gt=0)
    """A completion that made no progress for this long is given up."""
    archive_after_s: float = Field(default=3600.0, ge=0)
    """Seconds after a job's end at which its records move from Redis to object storage."""
    max_unfinished_jobs: int = Field(default=1000, ge=1)
    """Jobs of one tenant in a cell that have not finished; queued and paused ones count."""
    logger_hosts: str = ""
    """Hosts of W&B servers that tenants' figures may be sent to, as in `common.outgoing`: `api.wandb.ai`. Empty: none."""
    webhook_hosts: str = ""
    """Hosts that tenants' webhooks may be at. Empty: none."""
    export_proxy: str = ""
    """The proxy of the exporter's calls, if it has no way out itself. It must refuse the operator's own addresses."""
    export_every_s: float = Field(default=30.0, gt=0)
    """The exporter writes a job's new figures to its loggers this often."""
    export_processes: int = Field(default=2, ge=1)
    """Writers that the exporter runs at once, each for one tenant and one logger."""
    max_logger_bytes: Bytes = Field(default=1 << 30, ge=1)
    """Bytes of the exporter's disk that the files of one tenant's offline runs may take."""
    webhook_give_up_s: float = Field(default=86_400.0, ge=0, le=2 * 86_400)
    """A webhook that did not take a job's end for this long is not called any more."""
    max_kept_bytes: Bytes = Field(default=Limits().samples, ge=1 << 20)
    """Bytes that are kept for people to read: of a job's samples, of a base model's dead letters, of its workers' reports; and an
    eighth of it of a job's events. The oldest go first; jobs and `/metrics` say how many were dropped."""

    @field_validator("policy")
    @classmethod
    def _is_known(cls, value: str) -> str:
        parse_policy(value)
        return value

    @field_validator("rollout_range")
    @classmethod
    def _is_a_range(cls, value: str) -> str:
        if value:
            WorkerRange.parse(value)
        return value

    @property
    def bounds(self) -> WorkerRange | None:
        return WorkerRange.parse(self.rollout_range) if self.rollout_range and not self.deterministic else None

    @property
    def limits(self) -> Limits:
        return Limits.of(self.max_kept_bytes)

    @property
    def scheduling(self) -> Policy:
        return parse_policy(self.policy)
