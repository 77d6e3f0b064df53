"""`marlaas up` with a base model of the hub: it is pinned, its download is told of, and then everything works as from a folder."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from common.settings import TINY
from tests.common.test_hub import NEW, ROOT, environment_of
from tests.support.hub_server import running_hub


def test_up_and_readyz_tell_how_far_a_download_is(tmp_path: Path) -> None:
    with running_hub({"org/open": {NEW: TINY}}, gated=set()) as (url, hub):
        environment = environment_of(url, tmp_path / "home") | {"MARLAAS_BASE_MODELS": "q=org/open"}
        words = ("up", "--port", "0", "--data", str(tmp_path), "--json")
        argv = [sys.executable, "-m", "manager_service.launcher.commands.main", *words]
        up = subprocess.Popen(
            argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert up.stdout is not None and up.stderr is not None
        try:
            said: list[str] = []
            for line in up.stderr:
                said.append(line)
                if f"(q): downloading org/open@{NEW}: " in line and "% of 0.0 GB" in line:
                    break
            assert f"base model q: org/open@{NEW}\n" in said
            hub.go_on.set()
            url = json.loads(up.stdout.readline())["url"]
            ready = httpx.get(f"{url}/readyz", trust_env=False, timeout=60).json()
            assert ready == {"status": "ready", "waiting_for": [], "refused": [], "starting": []}
            key = {"Authorization": f"Bearer {(tmp_path / 'api_key').read_text().strip()}"}
            (base,) = httpx.get(f"{url}/v1/models", headers=key, trust_env=False, timeout=60).json()["data"]
            assert (base["base"]["source"], base["base"]["num_weights"]) == (f"org/open@{NEW}", 822_656)
        finally:
            hub.go_on.set()
            up.send_signal(signal.SIGTERM)
            up.communicate()
