"""A run as OpenTelemetry traces, sent by OTLP over HTTP while it goes on: `run.sinks =
[{ kind = "opentelemetry", url = "http://127.0.0.1:4318" }]`, or OTEL_EXPORTER_OTLP_ENDPOINT.

    run ┬ step 12      [ wait | prepare | hand_over | train | sync ]     at its StepDone
        ├ group 96     from admission to its verdict
        │  ├ generate  ┬ trajectory 0 ┬ chat        a turn: tokens read and written
        │  └ score     └ ...          └ execute_tool
        └ evaluation, checkpoint

Names follow OpenTelemetry's conventions for generative AI where they have one (gen_ai.*);
ours are rondel.*. Trajectories are told when they are trained; a group that was dropped has its
verdict alone. What ended in an error has its status and error.type. What cannot be sent is lost, and said.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rondel.core.clocks import now
from rondel.core.errors import ConfigError
from rondel.core.events import (
    Admitted,
    Checkpointed,
    Evaluated,
    Event,
    GroupFinished,
    GroupsTaken,
    Resumed,
    RunEnded,
    StepDone,
    Warned,
    emit,
)
from rondel.core.types import EnvFault, Group, PolicyFault, Trajectory

INSTALL = 'pip install "rondel[observe]"'
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # OpenTelemetry's own contract
NANO = 10**9
PROVIDER = {"gen_ai.provider.name": "rondel"}  # every span of an operation must name one
QUEUE = 2**15  # spans that wait to be sent: a step brings those of all its trajectories at once
Attributes = dict[str, Any]


def traces_of(endpoint: str, folder: str, model: str) -> TraceExporter | None:
    """None where nobody asked: neither the recipe nor OpenTelemetry's variables name an endpoint."""
    named = bool(endpoint)
    if not (named or any(os.environ.get(name) for name in ENDPOINTS)) or (
        not named and os.environ.get("OTEL_SDK_DISABLED") == "true"
    ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        if named:
            raise ConfigError(f'run.sinks: "opentelemetry" needs OpenTelemetry: {INSTALL}, or leave it out') from error
        emit(
            Warned(
                f"{' or '.join(ENDPOINTS)} is set, but no traces are sent: OpenTelemetry is not installed ({INSTALL})"
            )
        )
        return None
    # what it would say at every failure is said once, by the run
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    return TraceExporter(OTLPSpanExporter(endpoint=_traces_url(endpoint) if named else None), folder, model)


def _traces_url(endpoint: str) -> str:
    """The path of traces, unless the recipe names one."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f'run.sinks: url = "{endpoint}" of "opentelemetry" is not an address of OTLP over HTTP, '
            'such as "http://127.0.0.1:4318"'
        )
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


class TraceExporter:
    """Reads events, writes spans. An SDK `exporter` takes them, in a thread of its own."""

    def __init__(self, exporter: Any, folder: str, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._said = False
        self._ended = 0  # spans that are whole
        self.model = model
        self._groups: dict[int, tuple[Any, float]] = {}  # its span, and when its verdict came or 0
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "rondel", "rondel.run.folder": folder})
        )
        self._counted: Any = _Counted(exporter)  # an exporter in all but its class
        queue = None if os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") else QUEUE
        self._provider.add_span_processor(BatchSpanProcessor(self._counted, max_queue_size=queue))
        self._tracer = self._provider.get_tracer("rondel")
        self._run = self._tracer.start_span(
            "run",
            start_time=round(now() * NANO),
            attributes={"rondel.run.folder": folder, "gen_ai.request.model": model},
        )

    def on_event(self, event: Event) -> None:
        at = now()
        match event:
            case Admitted():
                span = self._start_span(
                    "group",
                    self._run,
                    at,
                    {"rondel.group": event.number, "rondel.task": event.task, "rondel.born": event.version},
                )
                self._groups[event.number] = (span, 0.0)
            case GroupFinished() if event.number in self._groups:
                self._export_verdict(event, at)
            case GroupsTaken():
                for group in event.groups:
                    self._export_trajectories(group, event.step)
            case StepDone():
                self._export_step(event, at)
            case Evaluated() | Checkpointed():
                name = "evaluation" if isinstance(event, Evaluated) else "checkpoint"
                told: Attributes = {"rondel.step": event.step, "rondel.version": event.version}
                if isinstance(event, Evaluated):
                    told |= {"gen_ai.evaluation.name": event.profile, "gen_ai.evaluation.score.value": event.score}
                self._export_span(name, self._run, at - event.seconds, at, told)
            case Warned():
                self._run.add_event("warning", {"rondel.message": event.message})
            case Resumed() | RunEnded():
                self._end_open_groups(at)
        if self._counted.failing and not self._said:
            self._said = True
            emit(
                Warned(
                    "traces cannot be sent, and are lost: is a collector listening there? The run goes on without them"
                )
            )

    def close(self) -> None:
        self._end_open_groups(now())
        if (error := sys.exception()) is not None:  # of the run that ends here
            _mark_error(self._run, type(error).__name__, str(error))
        self._end_span(self._run, now())
        self._counted.give_up_on_failure()
        self._provider.shutdown()
        if (lost := self._ended - self._counted.sent) > 0 and not self._said:
            emit(
                Warned(
                    f"{lost} of the {self._ended} spans of this run's traces were not sent: is a collector listening, and "
                    "as fast as they come? OTEL_BSP_MAX_QUEUE_SIZE sets how many wait"
                )
            )

    # -- spans -----------------------------------------------------------------------------------

    def _export_step(self, e: StepDone, now: float) -> None:
        laps = {name: seconds for name, seconds in e.seconds.items() if name != "step"}
        at = now - sum(laps.values())
        told: Attributes = {"rondel.step": e.step, "rondel.version": e.version}
        told |= {
            f"rondel.{name}": e.metrics[name]
            for name in ("score/reward_mean", "train/loss", "train/grad_norm")
            if name in e.metrics
        }
        step = self._start_span(f"step {e.step}", self._run, at, told)
        for name, seconds in laps.items():
            self._export_span(name, step, at, at + seconds, {"rondel.step": e.step})
            at += seconds
        self._end_span(step, now)

    def _export_verdict(self, e: GroupFinished, now: float) -> None:
        span, _ = self._groups[e.number]
        span.set_attributes(
            {"rondel.kept": e.kept, "rondel.reason": e.reason, "rondel.rewards": e.rewards, "rondel.lengths": e.lengths}
        )
        self._end_span(span, now)
        if e.kept:
            self._groups[e.number] = (span, now)
        else:
            del self._groups[e.number]

    def _export_trajectories(self, group: Group, step: int) -> None:
        span, verdict = self._groups.pop(group.id, (None, 0.0))
        laps = [lap for t in group.trajectories for lap in t.laps]
        if span is None or not laps:
            return
        began, ended = min(lap[1] for lap in laps), max(lap[1] + lap[2] for lap in laps)
        generate = self._export_span(
            "generate", span, began, ended, {"rondel.group": group.id, "rondel.trained_at": step}
        )
        for i, t in enumerate(group.trajectories):
            if t.laps:
                self._export_trajectory(t, f"{group.id}.{i}", generate)
        self._export_span("score", span, ended, max(ended, verdict), {"rondel.group": group.id})

    def _export_trajectory(self, t: Trajectory, name: str, parent: Any) -> None:
        began, ended = min(lap[1] for lap in t.laps), max(lap[1] + lap[2] for lap in t.laps)
        told: Attributes = {
            "gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": name, "gen_ai.request.model": self.model,
            "gen_ai.response.finish_reasons": [t.finish_reason], "gen_ai.usage.output_tokens": t.written,
            "gen_ai.usage.input_tokens": sum(lap[3] for lap in t.laps), **PROVIDER,
            "rondel.turns": sum(lap[3] > 0 for lap in t.laps), "rondel.outcome": type(t.outcome).__name__,
        }  # fmt: skip
        if t.agent:
            told["gen_ai.agent.name"] = t.agent
        if t.reward is not None:
            told["rondel.reward"] = t.reward
        span = self._start_span(f"trajectory {name}", parent, began, told)
        if isinstance(t.outcome, EnvFault | PolicyFault):
            _mark_error(span, type(t.outcome).__name__, t.outcome.reason)
        self._end_span(span, ended)
        for what, at, seconds, read, written in t.laps:
            if read:  # a turn of the policy; a tool, which may be named "chat", reads no tokens
                usage = {"gen_ai.usage.input_tokens": read, "gen_ai.usage.output_tokens": written, **PROVIDER}
                told = {"gen_ai.operation.name": "chat", "gen_ai.request.model": self.model, **usage}
            else:
                told = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": what}
            self._export_span("chat" if read else f"execute_tool {what}", span, at, at + seconds, told)

    def _start_span(self, name: str, parent: Any, at: float, told: Attributes) -> Any:
        from opentelemetry.trace import set_span_in_context

        return self._tracer.start_span(
            name, context=set_span_in_context(parent), start_time=round(at * NANO), attributes=told
        )

    def _export_span(self, name: str, parent: Any, began: float, ended: float, told: Attributes) -> Any:
        span = self._start_span(name, parent, began, told)
        self._end_span(span, ended)
        return span

    def _end_span(self, span: Any, at: float) -> None:
        self._ended += 1
        span.end(round(at * NANO))

    def _end_open_groups(self, now: float) -> None:
        """Groups in flight end here without a verdict."""
        for span, verdict in self._groups.values():
            if not verdict:
                span.set_attribute("rondel.reason", "unfinished")
                self._end_span(span, now)
        self._groups.clear()


def _mark_error(span: Any, kind: str, message: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))


class _Counted:
    """An exporter that counts what was taken. It runs in the SDK's thread, so it tells nobody.

    sent     spans that a collector has
    failing  whether the last batch could not be sent
    """

    def __init__(self, exporter: Any) -> None:
        self.exporter, self.sent, self.failing, self._last = exporter, 0, False, False

    def give_up_on_failure(self) -> None:
        """The run ends: what is left is tried once, and nothing where the batch before could not be sent."""
        self._last = True
        if self.failing:
            self.exporter.shutdown()  # which does not wait for another try

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self.failing and self._last:
            return SpanExportResult.FAILURE
        try:
            result = self.exporter.export(spans)
        except Exception:  # whatever a network or a collector does: the run does not depend on it
            result = SpanExportResult.FAILURE
        self.failing = result is not SpanExportResult.SUCCESS
        self.sent += 0 if self.failing else len(spans)
        return result

    def shutdown(self) -> None:
        self.exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self.exporter.force_flush(timeout_millis))
