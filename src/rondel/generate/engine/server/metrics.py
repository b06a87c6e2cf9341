"""/metrics: what Prometheus reads. Counters are counted, gauges are asked of the engine when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from rondel.generate.engine.server.answers import SampleAnswer

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """What every server counts."""

    def __init__(self, service: Any) -> None:
        self.service, self.registry = service, CollectorRegistry()
        self.requests = Counter("rondel_requests", "HTTP requests", ["path", "status"], registry=self.registry)
        self.tokens = Counter("rondel_tokens", "Tokens of finished answers", ["kind"], registry=self.registry)
        self.total = Histogram(
            "rondel_answer_seconds", "From arrival to the last token", buckets=SECONDS, registry=self.registry
        )
        self.first = Histogram(
            "rondel_queue_seconds", "From arrival to the first token", buckets=SECONDS, registry=self.registry
        )
        self.registry.register(self)

    def count_answers(self, answers: list[SampleAnswer]) -> None:
        for answer in answers:
            if (c := answer.completion) is not None:
                self.tokens.labels("prompt").inc(c.prompt_tokens)
                self.tokens.labels("cached").inc(c.cached_tokens)
                self.tokens.labels("generated").inc(len(c.tokens))
                self.total.observe(c.timings.get("total", 0.0))
                self.first.observe(c.timings.get("queue", 0.0))

    def collect(self) -> Iterator[Any]:
        """The engine's state now."""
        engine = self.service.engine
        gauges = {
            "rondel_open": ("Answers promised and not yet given", self.service.open),
            "rondel_weight_version": ("The weights that serve", engine.version),
        }
        for name, (says, value) in gauges.items():
            yield GaugeMetricFamily(name, says, value)
        state = GaugeMetricFamily("rondel_state", "1 for the state the engine is in", labels=["state"])
        for name in ("serving", "held", "asleep", "refusing"):
            state.add_metric([name], float(engine.state == name))
        yield state

    def render_metrics(self) -> bytes:
        return generate_latest(self.registry)


class CacheMetrics(ServerMetrics):
    """Beside them those of an engine with a cache of pages."""

    def collect(self) -> Iterator[Any]:
        yield from super().collect()
        engine = self.service.engine
        s = engine.scheduler
        yield GaugeMetricFamily("rondel_running", "Answers in the batch", len(s.running))
        yield GaugeMetricFamily("rondel_waiting", "Answers that wait for room in the batch", len(s.waiting))
        by = GaugeMetricFamily("rondel_pages", "Cache pages, one token each", labels=["kind"])
        for kind, n in s.caches.page_counts.items():
            by.add_metric([kind], n)
        yield by
        work = CounterMetricFamily(
            "rondel_engine_tokens", "Tokens the engine computed, or found in its cache", labels=["kind"]
        )
        for kind, n in (("prefilled", s.prefilled), ("decoded", s.decoded), ("reused", s.reused)):
            work.add_metric([kind], n)
        yield work
        if (guesses := engine.speculation) is not None:
            tried = CounterMetricFamily(
                "rondel_guesses", "Tokens guessed ahead, and those of them that stayed", labels=["kind"]
            )
            for kind, n in (("proposed", guesses.proposed), ("accepted", guesses.accepted)):
                tried.add_metric([kind], n)
            yield tried
            yield CounterMetricFamily(
                "rondel_guess_rounds", "Steps of an answer in which something was guessed", guesses.rounds
            )
        yield CounterMetricFamily("rondel_retracted", "Requests put back to make room", s.retracted)
