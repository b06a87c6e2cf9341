"""`run.sinks = [{ kind = "prometheus", port = 9464 }]`: the newest row of metrics for Prometheus, at
http://127.0.0.1:PORT/metrics while the run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rondel.core.errors import ConfigError
from rondel.runtime.telemetry.metrics import metric_meaning

HOST = "127.0.0.1"


class PrometheusSink:
    """A sink that answers when somebody looks: `score/reward_mean` is `rondel_score_reward_mean`."""

    def __init__(self, folder: str | Path = "", after: int = -1, *, port: int = 9464) -> None:
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16:
            raise ConfigError(f"run.sinks: port = {port!r} of 'prometheus'; it must be a number from 1 to 65535")
        try:
            import prometheus_client
        except ModuleNotFoundError as error:
            raise ConfigError(
                'run.sinks: "prometheus" needs prometheus_client: pip install "rondel[serve]", or leave it out'
            ) from error
        self._row: dict[str, float] = {}
        self._step = 0
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, addr=HOST, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"run.sinks: 'prometheus' at {HOST}:{port} cannot be opened ({error.strerror}); choose another port"
            ) from error
        self.port: int = self._server.server_port

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """An evaluation is a row of its own, and does not take away what the step has told."""
        self._step, self._row = step, {**(self._row if step == self._step else {}), **metrics}

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        yield GaugeMetricFamily("rondel_step", "the step that these are of", value=self._step)
        for name, value in dict(self._row).items():
            unit, says = metric_meaning(name) or ("", name)
            yield GaugeMetricFamily(
                "rondel_" + re.sub(r"\W", "_", name), f"{says} ({unit})" if unit else says, value=float(value)
            )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
