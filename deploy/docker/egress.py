"""Configures and runs squid as the one way out of the env workers' network, or of the exporter's.

MARLAAS_ENDPOINT_HOSTS, MARLAAS_GRADER_HOSTS and MARLAAS_OPENENV_HOSTS are the same lists that the workers check, MARLAAS_LOGGER_HOSTS
and MARLAAS_WEBHOOK_HOSTS those that the exporter does: names, `*.` names, addresses and networks. A name that leads to a private
address is refused unless that address, or its network, is in one of them too. Nothing is cached.
"""

import ipaddress
import os
from pathlib import Path

from common.private_networks import PRIVATE

CONFIG = Path("/tmp/squid.conf")
LISTS = tuple(f"MARLAAS_{name}_HOSTS" for name in ("ENDPOINT", "GRADER", "OPENENV", "LOGGER", "WEBHOOK"))


def is_network(entry: str) -> bool:
    try:
        ipaddress.ip_network(entry)
    except ValueError:
        return False
    return True


def configuration(hosts: str) -> str:
    """squid.conf for the operator's list."""
    entries = [entry.strip().strip("[]").lower() for entry in hosts.split(",") if entry.strip()]
    networks = [entry for entry in entries if is_network(entry)]
    names = [entry.removeprefix("*") for entry in entries if not is_network(entry)]
    lines = [
        "http_port 3128",
        f"acl private dst {' '.join(PRIVATE)}",
        "acl encrypted method CONNECT",
        "acl tls port 443",
    ]
    lines += [f"acl named dstdomain {name}" for name in names] + [f"acl listed dst {network}" for network in networks]
    if networks:
        lines.append("http_access allow listed")
    lines.append("http_access deny private")
    lines.append("http_access deny encrypted !tls")
    if names:
        lines.append("http_access allow named")
    lines += [
        "http_access deny all",
        "pinger_enable off",
        "via off",
        "forwarded_for delete",
        "cache deny all",
        "cache_mem 0 MB",
        "pid_filename none",
        "cache_log stdio:/dev/stderr",
        "access_log stdio:/dev/stdout",
        "logfile_rotate 0",
        "shutdown_lifetime 1 second",
        "coredump_dir none",
        "visible_hostname egress",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CONFIG.write_text(configuration(",".join(os.environ.get(name, "") for name in LISTS)))
    os.execvp("squid", ["squid", "-N", "-f", str(CONFIG)])
