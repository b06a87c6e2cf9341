"""`rondel serve` as a process on loopback, and the plain words to talk to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time

import openai

from kits.forked import Forked

JSON = {"Content-Type": "application/json"}
PLAIN = ["--dtype", "float32", "--device", "cpu", "--threads", "1"]


class Server:
    """One process of `rondel serve`, and the plain words to talk to it."""

    def __init__(self, folder, place, *more, port=0, key=""):
        self.key, file = key, place / "port"
        file.unlink(missing_ok=True)
        env = {k: v for k, v in os.environ.items() if k != "RONDEL_API_KEY"} | ({"RONDEL_API_KEY": key} if key else {})
        words = ["serve", str(folder), "--port", str(port), "--port-file", str(file), "--name", "tiny", *PLAIN, *more]
        self.log = (place / "log").open("w+")
        self.process = Forked(words, stdout=self.log, stderr=self.log, env=env)
        until(lambda: file.exists() or self.process.poll() is not None, 90)
        assert file.exists(), self.said()
        self.port = int(file.read_text())
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key or "none", max_retries=0, timeout=60
        )

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def raw(self, method, path, body=None, headers=None):
        """-> (status, headers, bytes)"""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        auth = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            link.request(method, path, body, auth | (headers or {}))
            reply = link.getresponse()
            return reply.status, reply.headers, reply.read()
        finally:
            link.close()

    def post(self, path, **body):
        status, _, data = self.raw("POST", path, json.dumps(body), JSON)
        return status, json.loads(data)

    def ok(self, path, **body):
        status, reply = self.post(path, **body)
        assert status == 200, reply
        return reply

    def get(self, path):
        return json.loads(self.raw("GET", path)[2])

    def info(self):
        return self.get("/get_server_info")

    def idle(self, seconds=20):
        """Nothing runs or waits, nothing is promised, every page is free or cached."""

        def quiet():
            i = self.info()
            return i["state"] == "serving" and not (i["open"] or i["running"] or i["waiting"])

        until(quiet, seconds)
        pages = self.info()["pages"]
        assert pages["free"] + pages["cached"] == pages["total"]

    def stop(self, number=signal.SIGKILL, seconds=30):
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        self.client.close()
        return code


def until(holds, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still waiting after {seconds} s"
        time.sleep(0.02)
