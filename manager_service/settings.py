"""Settings of one manager process, read once at its start."""

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from common.settings import Settings
from manager_service.kept import Limits
from manager_service.scheduling.policies import Policy, parse_policy
from manager_service.scheduling.training_queue import Discipline


class ManagerSettings(Settings):
    """`MARLAAS_*` variables of the manager alone; `common.settings` has those of every service."""

    model_config = SettingsConfigDict(env_prefix="MARLAAS_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    policy: str = "marlaas"
    """The times at which jobs may sample and train: sequential, synchronous, naive, marlaas, bounded or bounded:ETA. See
    `manager_service.scheduling.policies`."""
    training_queue: Discipline = "fused"
    """The order in which complete batches go to the trainers. See `manager_service.scheduling.training_queue`."""
    max_file_bytes: int = Field(default=256 << 20, ge=1)
    """The largest uploaded file."""
    max_uploads_bytes: int = Field(default=1 << 30, ge=1)
    """Bytes of this manager's disk that one tenant's uploads under way may take."""
    max_stored_bytes: int = Field(default=16 << 30, ge=1)
    """All files that a tenant keeps."""
    max_line_bytes: int = Field(default=256 << 10, ge=1)
    """The longest line of it: the whole item travels in messages."""
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """The largest body of every other request."""
    max_open_requests: int = Field(default=1024, ge=1)
    """Requests of one tenant that are open at once on this manager, besides those for events."""
    max_event_streams: int = Field(default=100, ge=1)
    """Requests of one tenant for events of jobs that are open at once on this manager: streams, above all."""
    inference_share: float = Field(default=0.5, gt=0, le=1)
    """The share of the live rollout slots that the completions of all tenants may take, over all replicas of the manager."""
    inference_silence_s: float = Field(default=10.0, gt=0)
    """A turn that nobody worked on for this long is asked for again."""
    inference_timeout_s: float = Field(default=120.0, gt=0)
    """A completion that made no progress for this long is given up."""
    grader_run_timeout_s: float = Field(default=60.0, gt=0)
    """The longest time of one call of `graders/run`."""
    command_wait_s: float = Field(default=3.0, ge=0)
    """Cancel, pause and resume wait this long for the job's owner before they answer."""
    keep_alive_s: float = Field(default=10.0, gt=0)
    """Seconds between comments on a silent stream of events."""
    archive_after_s: float = Field(default=3600.0, ge=0)
    """Seconds after a job's end at which its records move from Redis to object storage."""
    max_unfinished_jobs: int = Field(default=1000, ge=1)
    """Jobs of one tenant in a cell that have not finished; queued and paused ones count."""
    max_unfinished_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Bytes of those jobs' records together, of which methods are the most."""
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
    export_give_up_s: float = Field(default=3 * 86_400.0, ge=0)
    """After a job's end, a logger that took nothing for this long gets no more of it."""
    max_logger_bytes: int = Field(default=1 << 30, ge=1)
    """Bytes of the exporter's disk that the files of one tenant's offline runs may take."""
    webhook_give_up_s: float = Field(default=86_400.0, ge=0, le=2 * 86_400)
    """A webhook that did not take a job's end for this long is not called any more."""
    idempotency_s: int = Field(default=86_400, ge=1)
    """An Idempotency-Key is remembered this long."""

    max_events_bytes: int = Field(default=Limits().events, ge=1 << 16)
    """Bytes that are kept of a job's events; the oldest go first. The job says how many were dropped."""
    max_samples_bytes: int = Field(default=Limits().samples, ge=1 << 16)
    """Bytes that are kept of a job's samples; the oldest versions go first. The job says how many were dropped."""
    sample_groups: int = Field(default=Limits().sample_groups, ge=0, le=1024)
    """Groups of each step whose samples are kept, the first ones."""
    sample_items: int = Field(default=Limits().sample_items, ge=0, le=1024)
    """Held-out items, the first ones, of which every evaluation keeps one answer, so that versions can be compared."""
    other_samples: int = Field(default=Limits().other_samples, ge=0, le=1024)
    """Samples of each step that are kept as its best, its worst and its failed: so many of each."""
    max_dead_bytes: int = Field(default=Limits().dead, ge=1 << 16)
    """Bytes that are kept of a base model's dead letters; the oldest go first. `/metrics` says how many were dropped."""
    max_telemetry_bytes: int = Field(default=Limits().telemetry, ge=1 << 16)
    """Bytes that are kept of the workers' reports; the oldest go first. `/metrics` says how many were dropped."""

    @field_validator("policy")
    @classmethod
    def _is_known(cls, value: str) -> str:
        parse_policy(value)
        return value

    @property
    def limits(self) -> Limits:
        return Limits(
            self.max_events_bytes,
            self.max_samples_bytes,
            dead=self.max_dead_bytes,
            telemetry=self.max_telemetry_bytes,
            sample_groups=self.sample_groups,
            sample_items=self.sample_items,
            other_samples=self.other_samples,
        )

    @property
    def scheduling(self) -> Policy:
        return parse_policy(self.policy)
