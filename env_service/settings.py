"""Settings of the env service, in addition to the common ones."""

from pydantic import Field

from common.settings import Settings


class EnvSettings(Settings):
    env_slots: int = Field(default=64, ge=1)
    """Messages worked on at once; most of them wait for a tool or an endpoint. Tenants share them by weight."""
    env_sessions: int = Field(default=64, ge=1)
    """Sessions of live environments at once, each from its trajectory's first turn to the last, and one more of a tenant that has none.
    Tenants share them by weight."""
    env_package_memory_mb: int = Field(default=4096, ge=64)
    """Data of one process in which a package for `verifiers` runs."""
    sandbox_processes: int = Field(default=4, ge=1)
    """Sandboxed calls that run at once in this worker, and one more of a tenant that has none running."""
    sandbox_memory_mb: int = Field(default=512, ge=64)
    """Address space of one sandboxed call."""
    weak_sandbox: bool = False
    """Start even where the sandbox is weaker than docs/operations.md says."""
    endpoint_hosts: str = ""
    """Hosts that `endpoint` graders may call, comma-separated: `api.example.org`, `*.example.org`. A private address is
    called only if the address itself, or its network (`10.1.0.0/16`), is in the list as well."""
    endpoint_proxy: str = ""
    """`http://host:port` of the proxy that `endpoint` graders' calls go through. Empty: they go out directly."""
    grader_hosts: str = ""
    """Hosts whose models graders may ask (`score_model`, `label_model` with a `url`), written as in `endpoint_hosts`. Empty: none."""
    grader_keys: str = Field(default="", repr=False)
    """The operator's keys for them, comma-separated: `https://api.example.org=sk-…`. A key goes to that address only."""
    grader_model_calls: int = Field(default=8, ge=1)
    """Questions of one tenant to such models at once, in this worker."""
    openenv_hosts: str = ""
    """Hosts whose OpenEnv servers jobs may name by `url`, written as in `endpoint_hosts`. Empty: none."""
    openenv_servers: str = ""
    """The operator's OpenEnv servers, which jobs name by `server`: `maze=http://10.0.0.5:8000,chess=https://…`."""
