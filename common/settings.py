"""Settings that all services share. Each service reads its `MARLAAS_*` variables once, in `__main__`."""

import os
import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from common.errors import InvalidInput
from common.pool.placement import PlacementRule
from common.suggestions import nearest

PREFIX, TEST_PREFIX = "MARLAAS_", "MARLAAS_TEST_"

_KNOWN = (
    # all services
    "redis_url data_dir store_url disk_reserve_bytes base_models base_model max_context lease_s deterministic log_level "
    "heartbeat_file pool_worker pool_bytes placement slice_max_s slice_drain_s "
    "peers peer_port peer_bytes_per_s cache_dir cache_bytes store_places convoys "
    # the manager
    "host port policy rollout_range repack inference_timeout_s archive_after_s "
    "max_open_requests max_unfinished_jobs max_stored_bytes max_kept_bytes "
    "logger_hosts webhook_hosts export_proxy export_every_s export_processes max_logger_bytes webhook_give_up_s "
    # env workers
    "env_slots env_sessions env_package_memory_mb sandbox_processes sandbox_memory_mb weak_sandbox "
    "endpoint_hosts endpoint_proxy grader_hosts grader_keys grader_model_calls openenv_hosts openenv_servers "
    # rollout workers
    "engine rollout_device rollout_dtype rollout_backbone rollout_threads rollout_slots rollout_orphan_slots "
    "rollout_kv_bytes rollout_idle_adapter_bytes rollout_progress_s own_streams "
    "vllm_max_loras vllm_max_known_loras vllm_max_lora_rank vllm_tensor_parallel vllm_memory_fraction vllm_enforce_eager "
    # trainers
    "trainer_device trainer_dtype trainer_backbone trainer_threads trainer_ranks trainer_micro_batch_tokens "
    "trainer_memory_bytes trainer_memory_fraction trainer_checkpointing trainer_kernels trainer_cache_bytes "
    # `marlaas up`
    "devices rollout_share "
    # the command line
    "url api_key"
)
KNOWN = frozenset(_KNOWN.split())
"""The settings of all services, so that each can refuse a misspelt one without importing the others."""

LEAST_CONTEXT = 64
"""The least context that MARLAAS_MAX_CONTEXT may ask for, in tokens."""
TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"


_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?) *(?:([kmgt])(i?)b?|b)?", re.ASCII | re.IGNORECASE)


def parse_bytes(text: object) -> int:
    """`20GB`, `16GiB`, or a number -> bytes. Raises ValueError, also for what only begins so, such as `20,000`."""
    if not (found := _SIZE.fullmatch(str(text).strip())):
        raise ValueError("write a number of bytes, or a size such as 20GB or 16GiB")
    number, prefix, binary = found.groups(default="")
    return int(Decimal(number) * (1024 if binary else 1000) ** (1 + "kmgt".find(prefix.lower() or "-")))


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


class Settings(BaseSettings):
    """The common part. Each service adds its own in its `settings.py`."""

    model_config = SettingsConfigDict(env_prefix="MARLAAS_", frozen=True, extra="ignore")

    redis_url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    """`redis://`, `rediss://`, or `redis+cluster://host:port,host:port`. May carry a password, so never prints."""
    data_dir: Path = Path(".marlaas")
    """The folder in which `marlaas up` keeps Redis' files, the store, keys and logs."""
    store_url: str = ""
    """`file:///folder` or `s3://bucket/prefix`. Empty: the folder `store` in `data_dir`."""
    base_models: str = "tiny"
    """name=path, name=hub/name[@revision] or name=store:name@digest, comma-separated; the bare name `tiny` is the one that ships."""
    base_model: str = ""
    """The one of `base_models` that this worker serves. Empty: all, in turn."""
    pool_worker: str = ""
    """The worker whose turns this process takes with one base model; standard input is its gate. Pool workers set it."""
    pool_bytes: Bytes = Field(default=0, ge=0)
    """Memory for the base models' processes of a worker that serves several. 0: half of what is free at its start."""
    placement: PlacementRule = "backfill"
    """The rule by which base models have places on the workers that serve several."""
    slice_max_s: float = Field(default=30.0, gt=0)
    """The longest turn of a base model that has work while another waits, or twenty times what its opening took."""
    slice_drain_s: float = Field(default=2.0, ge=0)
    """Time for which turns may end before a base model is closed; then they go to other workers with their tokens."""
    max_context: int | None = Field(default=None, ge=LEAST_CONTEXT)
    """The most tokens of a conversation, the model's included; never more than the base model's own context."""
    disk_reserve_bytes: Bytes = Field(default=1 << 30, ge=0)
    """Bytes that stay free on the disk of a local store, and of the Redis of `marlaas up`: with fewer, no step is trained."""
    lease_s: float = Field(default=10.0, gt=0)
    """Work that did not advance for this long is taken over by another worker."""
    deterministic: bool = False
    """Bit-exact mode: docs/architecture.md, I8."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    heartbeat_file: Path | None = None
    """A file that a living worker touches once a second, whatever it waits for. None: no such file."""
    peers: bool | None = None
    """Base models and large adapters come to rollout workers through others, so that the store is read once. Unless set: if the store
    is no folder, which is read as fast as a worker's own."""
    peer_port: int = Field(default=0, ge=0, le=65_000)
    """The first of 16 ports, of which a worker serves its peers at the first free one, at its address on the way to Redis. 0: any."""
    peer_bytes_per_s: Bytes | None = Field(default=None, ge=1 << 20)
    """The most that a worker sends to its peers; unless set as fast as it can."""
    cache_dir: Path | None = None
    """A folder of the machine in which its workers keep base models and adapters for each other. Unless set: `cache` in `data_dir`."""
    cache_bytes: Bytes = Field(default=10 << 30, ge=0)
    """Bytes of adapters in `cache_dir`: beyond them the least recently used go."""
    store_places: int = Field(default=1, ge=1)
    """Workers that may read one file from the store at once; the others follow them."""
    convoys: int = Field(default=0, ge=0, le=16)
    """Rollout workers that fetch a base model from the store together serve before any has the whole, each with one of so many parts
    of its layers; 0, and where base models take turns: none do."""

    @field_validator("base_models")
    @classmethod
    def _parses(cls, value: str) -> str:
        parse_base_models(value)
        return value

    @field_validator("convoys")
    @classmethod
    def _have_peers(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("peers") is False:
            raise ValueError("workers must reach each other for them: leave MARLAAS_PEERS unset")
        return value

    @property
    def store(self) -> str:
        return self.store_url or (self.data_dir.resolve() / "store").as_uri()

    @property
    def relays(self) -> bool:
        """Do files come through peers?"""
        return bool(self.convoys) or not self.store.startswith("file:") if self.peers is None else self.peers

    @property
    def node_dir(self) -> Path:
        return self.cache_dir or self.data_dir / "cache"

    @property
    def models(self) -> dict[str, str]:
        """Base model name -> local path, hub name, or name in the store."""
        return parse_base_models(self.base_models)

    @property
    def model_name(self) -> str:
        """The base model that this worker serves. Raises InvalidInput unless `base_models` has `base_model`."""
        name = self.base_model or next(iter(self.models))
        if name not in self.models:
            raise InvalidInput(f"MARLAAS_BASE_MODEL={name} is not among MARLAAS_BASE_MODELS={self.base_models}")
        return name


TEXT_FILES = ("*.json", "*.jinja", "*.txt")
MODEL_FILES = [*TEXT_FILES, "*.safetensors"]


STORED = re.compile(r"store:([^@/:{}=, ]+)@([0-9a-f]{32}-[0-9a-f]{32})")


def stored_digest(where: str) -> str:
    """The digest of a base model in object storage, `store:NAME@DIGEST`, where NAME is for people; empty for others."""
    found = STORED.fullmatch(where)
    return found[2] if found else ""


def kept_base(where: str, node_dir: Path) -> str:
    """The folder of a machine in which a base model in object storage is kept whole; of others, their own place."""
    digest = stored_digest(where)
    return str(node_dir / "bases" / digest) if digest else where


def parse_base_models(value: str) -> dict[str, str]:
    """`a=path,b=hub/name` -> {"a": "path", "b": "hub/name"}. Raises ValueError."""
    models: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in value.split(","))):
        name, equals, where = part.partition("=")
        if not equals and name != "tiny":
            raise ValueError(f"base model {part!r}: write name=path or name=hub/name (only `tiny` stands alone)")
        if equals and not where:
            raise ValueError(f"base model {part!r}: a folder or a hub's name is missing after the =")
        if not name or set(name) & set("{}:@/ "):
            raise ValueError(f"base model name {name!r}: letters, digits, '.', '_' and '-' only")
        if where.startswith("store:") and not stored_digest(where):
            raise ValueError(f"base model {part!r}: write name=store:NAME@DIGEST as `marlaas base push` prints it")
        if name in models:
            raise ValueError(f"base model {name!r} is named twice: give each a name of its own")
        models[name] = where or str(TINY)
    if not models:
        raise ValueError("MARLAAS_BASE_MODELS names no base model")
    return models


def resolve_model(where: str) -> Path:
    """A local folder with the model's files; downloads a hub's `owner/name@revision`. Raises InvalidInput."""
    folder = Path(where)
    if folder.is_dir():
        return folder
    if not _is_of_hub(where):
        raise InvalidInput(f"base model: {where} is neither a folder nor a hub name (owner/name, owner/name@revision)")
    return _download(where)


def local_folder(where: str) -> Path | None:
    """The folder of a base model that is here already; None if it would have to be downloaded."""
    if Path(where).is_dir():
        return Path(where)
    if not _is_of_hub(where):
        return None
    from huggingface_hub import snapshot_download  # here, as in `_download`

    repo, _, revision = where.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):
        return None


def resolve_config(where: str) -> Path:
    """A folder with the model's text files at least, without weights. Raises InvalidInput."""
    return _download(where, *TEXT_FILES) if _is_of_hub(where) else resolve_model(where)


def _is_of_hub(where: str) -> bool:
    """Can this be a hub's name? It is neither a path nor there."""
    is_path = where.startswith((".", "/", "~")) or Path(where).exists()
    return not is_path and where.partition("@")[0].count("/") == 1


def pinned(where: str) -> str:
    """The base model by its commit, if a hub's name has no revision: one for all services. Raises InvalidInput."""
    if Path(where).is_dir() or "@" in where:
        return where
    return f"{where}@{resolve_config(where).name}"


def _download(name: str, *patterns: str) -> Path:
    from huggingface_hub import errors, snapshot_download  # imported here: only services that load from a hub need it

    repo, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=list(patterns) or MODEL_FILES))
    except errors.GatedRepoError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise InvalidInput(
            f"base model: {repo} is gated: accept its licence on the hub, and set HF_TOKEN to a token of that account"
        ) from error
    except (OSError, ValueError, errors.HTTPError) as error:  # pyright: ignore[reportPrivateImportUsage]
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise InvalidInput(
            f"base model: {name} cannot be had from the hub ({reason}); check the name and the network, or name a folder"
        ) from error


def dtype_on(device: str) -> str:
    """The default dtype of a base model, the same for rollout and trainer on devices of one kind."""
    return "float32" if device == "cpu" else "bfloat16"


def itemsize_of(dtype: str) -> int:
    """Bytes of a weight."""
    return 4 if dtype == "float32" else 2


def explained(error: Exception) -> str:
    """Explains faults of settings by the names of variables; of another error, gives its text."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(
        f"{PREFIX}{'_'.join(map(str, found['loc'])).upper()}={found['input']}: {found['msg'].removeprefix('Value error, ')}"
        for found in error.errors()
    )


def refuse_unknown() -> None:
    """Raises InvalidInput for an unknown `MARLAAS_*` variable, with the nearest known one."""
    for variable in sorted(os.environ):
        name = variable.upper()
        setting = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX) or name.startswith(TEST_PREFIX) or setting in KNOWN:
            continue
        near = nearest(setting, sorted(KNOWN))
        hint = f"; did you mean {PREFIX}{near.upper()}?" if near else ""
        raise InvalidInput(f"unknown setting {variable}{hint}")
