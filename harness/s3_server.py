"""An S3 server of one's own over HTTP (moto, in memory)."""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from xml.etree import ElementTree

import httpx

from harness.redis_server import free_port

BUCKET = "marlaas"
SIGNED = {"Authorization": "AWS testing:unchecked"}
"""Without any signature the server takes a reader for the public."""


def environment(endpoint: str) -> dict[str, str]:
    """The variables by which any S3 client finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


@dataclass
class S3Server:
    port: int
    process: "subprocess.Popen[bytes]"
    _http: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, timeout=60))

    @classmethod
    def start(cls) -> "S3Server":
        """Returns once it answers and has the bucket."""
        port = free_port()
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = cls(port, subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        server.reset()
        return server

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        """Empty, but for the bucket."""
        for _ in range(600):
            try:
                self._http.post(f"{self.endpoint}/moto-api/reset").raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.1)
        self._http.put(f"{self.endpoint}/{BUCKET}").raise_for_status()

    def check_keys(self, after: int) -> None:
        """Refuse unknown access keys once `after` more requests have been answered."""
        self._http.post(f"{self.endpoint}/moto-api/reset-auth", content=str(after)).raise_for_status()

    def stop(self) -> None:
        self._http.close()
        self.process.kill()
        self.process.wait()

    def get(self, path: str) -> bytes:
        """Content of an object of the bucket. Raises HTTPStatusError."""
        return self._http.get(f"{self.endpoint}/{BUCKET}/{path}", headers=SIGNED).raise_for_status().content

    def paths(self) -> list[str]:
        """Paths of all objects of the bucket, sorted."""
        found, more = list[str](), {"list-type": "2"}
        while True:
            answer = self._http.get(f"{self.endpoint}/{BUCKET}", params=more, headers=SIGNED).raise_for_status()
            page = ElementTree.fromstring(answer.content)
            found += [key.text or "" for key in page.iterfind("{*}Contents/{*}Key")]
            if not (token := page.findtext("{*}NextContinuationToken")):
                return sorted(found)
            more["continuation-token"] = token
