"""Who makes boxes over HTTP: an adapter knows the addresses and bodies of one provider, and nothing else.

e2b         https://e2b.dev/docs/api-reference/sandboxes/create-sandbox and the Process service of its envd
daytona     https://www.daytona.io/docs/en/process-code-execution and its toolbox interface
kubernetes  https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/ : a job with a small agent,
            which the API server's proxy of its pod reaches
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol

from rondel.core.errors import SandboxError
from rondel.core.sandbox_types import Limits

PATIENCE, TRIES = 60.0, 6  # seconds for one answer; how often what may pass by is asked for
PASSING = (408, 425, 429, 500, 502, 503, 504)
START_SECONDS = 300.0  # for a box to be there
AGENT_PORT, ENVD_PORT = 8000, 49983
AGENT = """
import json, subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Agent(BaseHTTPRequestHandler):
    def do_GET(self): self.reply({"ready": True})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        done = subprocess.run(["sh", "-c", asked["command"]], capture_output=True)
        self.reply({"code": done.returncode, "result": done.stdout.decode(errors="replace")})
    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
ThreadingHTTPServer(("", 8000), Agent).serve_forever()
"""  # 8000: AGENT_PORT


class Provider(Protocol):
    name: str
    place: str

    def create(self, limits: Limits) -> str: ...
    def execute(self, box: str, command: str, timeout: float) -> str: ...  # stdout of a shell line
    def delete(self, box: str) -> None: ...  # also of one that is gone


class HttpClient:
    """JSON over HTTP with a key. What may pass by is asked for again, later and later; a command is not: it may have
    been carried out.
    """

    def __init__(self, what: str, base: str, headers: dict[str, str], context: ssl.SSLContext | None = None) -> None:
        self.what, self.base, self.headers, self.context = what, base.rstrip("/"), headers, context
        self.pause: Callable[[float], None] = time.sleep

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float = PATIENCE,
        again: bool = True,
        gone: bool = False,
    ) -> Any:
        """-> the answer. `gone`: that there is nothing is an answer, too (None)."""
        data = None if body is None else json.dumps(body).encode()
        raw = self.send(
            method, path, data, {"Content-Type": "application/json"}, timeout=timeout, again=again, gone=gone
        )
        try:
            return json.loads(raw) if raw else None
        except ValueError:
            raise SandboxError(f"{self.what}: {method} {path} is answered with no JSON: {raw[:200]!r}") from None

    def send(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        *,
        timeout: float,
        again: bool,
        gone: bool = False,
    ) -> bytes:
        url = path if path.startswith("http") else f"{self.base}{path}"
        fault = ""
        for trial in range(TRIES if again else 1):
            if trial:
                self.pause(min(30.0, 0.5 * 2**trial))
            request = urllib.request.Request(url, data, {**self.headers, **headers}, method=method)
            try:
                with urllib.request.urlopen(request, timeout=timeout, context=self.context) as answer:
                    found: bytes = answer.read()
                    return found
            except urllib.error.HTTPError as error:
                said = error.read(500).decode(errors="replace").strip()
                if gone and error.code == 404:
                    return b""
                fault = f"{error.code} {said[-200:]}"
                if error.code not in PASSING:
                    break
            except (OSError, urllib.error.URLError) as error:
                fault = str(getattr(error, "reason", error))
        raise SandboxError(f"{self.what}: {method} {url} failed: {fault}")


def key_of(what: str, name: str) -> str:
    """From the environment alone."""
    if not (key := os.environ.get(name, "").strip()):
        raise SandboxError(f"{what} needs a key: set the environment variable {name}")
    return key


class E2b:
    name = "e2b"

    def __init__(self, *, image: str = "", url: str = "", timeout: float = 3600.0, namespace: str = "") -> None:
        self.place, self.image, self.timeout = url or "https://api.e2b.app", image or "base", timeout
        self.client = HttpClient("e2b", self.place, {"X-API-Key": key_of("e2b", "E2B_API_KEY")})
        self._doors: dict[str, tuple[str, dict[str, str]]] = {}  # box -> (address of its envd, headers)

    def create(self, limits: Limits) -> str:
        body = {
            "templateID": self.image, "timeout": int(self.timeout), "secure": True, "allow_internet_access": limits.network,
            "metadata": {"made-by": "rondel"},
        }  # fmt: skip
        told = self.client.request("POST", "/sandboxes", body, again=False)
        box, domain, token = told["sandboxID"], told.get("domain") or "e2b.app", told.get("envdAccessToken")
        local = self.place.startswith("http://")  # a server of one's own, which is reached at one address
        door = f"{self.place}/envd/{box}" if local else f"https://{ENVD_PORT}-{box}.{domain}"
        self._doors[box] = (door, {"X-Access-Token": token} if token else {})
        return str(box)

    def execute(self, box: str, command: str, timeout: float) -> str:
        """By Connect's protocol for streams: each message a byte of flags, four of length, and JSON."""
        door, headers = self._doors[box]
        asked = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", command]}}).encode()
        framed = struct.pack(">BI", 0, len(asked)) + asked
        basic = base64.b64encode(b"user:").decode()
        raw = self.client.send(
            "POST",
            f"{door}/process.Process/Start",
            framed,
            {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "Authorization": f"Basic {basic}", **headers},
            timeout=timeout,
            again=False,
        )  # fmt: skip
        said = b""
        while raw:
            flags, size = struct.unpack(">BI", raw[:5])
            message, raw = json.loads(raw[5 : 5 + size] or b"{}"), raw[5 + size :]
            if flags & 2 and "error" in message:
                raise SandboxError(f"e2b: a command failed: {message['error']}")
            said += base64.b64decode(message.get("event", {}).get("data", {}).get("stdout", ""))
        return said.decode(errors="replace")

    def delete(self, box: str) -> None:
        self.client.request("DELETE", f"/sandboxes/{box}", gone=True)


class Daytona:
    name = "daytona"

    def __init__(self, *, image: str = "", url: str = "", timeout: float = 3600.0, namespace: str = "") -> None:
        self.place, self.image, self.timeout = url or "https://app.daytona.io/api", image, timeout
        self.client = HttpClient(
            "daytona", self.place, {"Authorization": f"Bearer {key_of('daytona', 'DAYTONA_API_KEY')}"}
        )

    def create(self, limits: Limits) -> str:
        body: dict[str, Any] = {
            "labels": {"made-by": "rondel"}, "networkBlockAll": not limits.network, "autoStopInterval": max(1, int(self.timeout / 60)),
            "autoDeleteInterval": 0, **({"snapshot": self.image} if self.image else {}),
        }  # fmt: skip
        told = self.client.request("POST", "/sandbox", body, again=False)
        until = time.monotonic() + START_SECONDS
        while told.get("state", "started") != "started":
            if told["state"] in ("error", "build_failed") or time.monotonic() > until:
                self.delete(told["id"])
                raise SandboxError(f"daytona: box {told['id']} is {told['state']}: {told.get('errorReason', '')}")
            self.client.pause(0.5)
            told = self.client.request("GET", f"/sandbox/{told['id']}")
        return str(told["id"])

    def execute(self, box: str, command: str, timeout: float) -> str:
        body = {"command": f"sh -c {_quoted(command)}", "timeout": int(timeout)}
        path = f"/toolbox/{box}/toolbox/process/execute"
        told = self.client.request("POST", path, body, timeout=timeout + 30, again=False)
        return str(told["result"])

    def delete(self, box: str) -> None:
        self.client.request("DELETE", f"/sandbox/{box}?force=true", gone=True)


class Kubernetes:
    name = "kubernetes"

    def __init__(self, *, image: str = "", url: str = "", timeout: float = 3600.0, namespace: str = "default") -> None:
        account = "/var/run/secrets/kubernetes.io/serviceaccount"
        inside = os.environ.get("KUBERNETES_SERVICE_HOST")
        self.place = url or (f"https://{inside}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}" if inside else "")
        if not self.place:
            raise SandboxError("kubernetes: set url to the address of the API server; outside a cluster none is known")
        if os.path.exists(f"{account}/token") and "KUBERNETES_TOKEN" not in os.environ:
            with open(f"{account}/token") as file:
                token = file.read().strip()
        else:
            token = key_of("kubernetes", "KUBERNETES_TOKEN")
        authority = os.environ.get("KUBERNETES_CA") or f"{account}/ca.crt"
        context = ssl.create_default_context(cafile=authority) if os.path.exists(authority) else None
        self.image, self.timeout, self.namespace = image or "python:3.11-slim", timeout, namespace
        self.client = HttpClient("kubernetes", self.place, {"Authorization": f"Bearer {token}"}, context)
        self._pods: dict[str, str] = {}

    def create(self, limits: Limits) -> str:
        jobs = f"/apis/batch/v1/namespaces/{self.namespace}/jobs"
        box = self.client.request("POST", jobs, self.job(limits), again=False)["metadata"]["name"]
        until = time.monotonic() + START_SECONDS
        while True:
            pods = self.client.request(
                "GET", f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=job-name%3D{box}"
            )
            pod = next((one for one in pods["items"] if one["status"].get("phase") == "Running"), None)
            if pod is not None:
                self._pods[box] = pod["metadata"]["name"]
                break
            if time.monotonic() > until:
                self.delete(f"{self.namespace}/{box}")
                raise SandboxError(f"kubernetes: no pod of job {box} runs after {START_SECONDS:g} s")
            self.client.pause(0.5)
        self.client.request("GET", self._agent(box))  # again while it starts
        return f"{self.namespace}/{box}"

    def job(self, limits: Limits) -> dict[str, Any]:
        """No token of the cluster, no privilege, nothing to write to but memory; ended by the cluster itself in time.
        Whether it reaches a network is the cluster's to say (a NetworkPolicy for app = rondel-sandbox).
        """
        size = f"{limits.disk}"
        container = {
            "name": "box", "image": self.image, "command": ["python3", "-c", AGENT], "workingDir": "/box",
            "resources": {"limits": {"memory": str(limits.memory), "cpu": "1"}, "requests": {"memory": "64Mi", "cpu": "100m"}},
            "securityContext": {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsNonRoot": True, "runAsUser": 65534,
                "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "volumeMounts": [{"name": "box", "mountPath": "/box"}, {"name": "tmp", "mountPath": "/tmp"}],
        }  # fmt: skip
        volumes = [{"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": size}} for name in ("box", "tmp")]
        pod = {
            "restartPolicy": "Never", "automountServiceAccountToken": False, "enableServiceLinks": False, "containers": [container],
            "volumes": volumes,
        }  # fmt: skip
        labels = {"app": "rondel-sandbox"}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"generateName": "rondel-", "labels": labels},
            "spec": {
                "backoffLimit": 0, "activeDeadlineSeconds": int(self.timeout), "ttlSecondsAfterFinished": 60,
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }  # fmt: skip

    def execute(self, box: str, command: str, timeout: float) -> str:
        told = self.client.request("POST", self._agent(box), {"command": command}, timeout=timeout + 30, again=False)
        return str(told["result"])

    def delete(self, box: str) -> None:
        namespace, _, job = box.rpartition("/")
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{job}?propagationPolicy=Background"
        self.client.request("DELETE", path, gone=True)

    def _agent(self, box: str) -> str:
        pod = self._pods[box.rpartition("/")[2]]
        return f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{AGENT_PORT}/proxy/"


def _quoted(command: str) -> str:
    return "'" + command.replace("'", "'\"'\"'") + "'"


PROVIDERS: dict[str, Callable[..., Provider]] = {"e2b": E2b, "daytona": Daytona, "kubernetes": Kubernetes}


def delete_box(provider: str, url: str, box: str) -> None:
    PROVIDERS[provider](url=url).delete(box)
