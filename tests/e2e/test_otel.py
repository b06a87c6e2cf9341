"""A run as OpenTelemetry traces: into the SDK's own memory, and over HTTP to a receiver that
decodes what OTLP sends.
"""

from __future__ import annotations

import http.server
import threading
from contextlib import ExitStack

import pytest

from kits.runs import run
from rondel.core.errors import ConfigError
from rondel.core.events import Admitted, GroupFinished, GroupsTaken, StepDone, Warned, subscribe
from rondel.core.types import Group, PolicyFault, Score, Task, Trajectory
from rondel.runtime.telemetry.otel import TraceExporter, traces_of

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ADDRESSES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@pytest.fixture(autouse=True)
def nobody_asks(monkeypatch):
    for name in ADDRESSES:
        monkeypatch.delenv(name, raising=False)


def told(*events, exporter=None):
    memory = exporter or InMemorySpanExporter()
    traces = TraceExporter(memory, "runs/x", "tiny")
    for event in events:
        traces.on_event(event)
    traces.close()
    return {} if exporter else {span.name: span for span in memory.get_finished_spans()}


def test_spans_stand_in_each_other_with_the_names_of_the_conventions():
    t = Trajectory(score=Score(1.0), finish_reason="stop")
    t.extend([1, 2, 3])
    t.extend([4, 5], logprobs=[-1.0, -1.0], versions=[0, 0])
    t.laps += [("chat", 100.0, 2.0, 3, 2), ("search", 102.0, 0.5, 0, 0), ("chat", 102.0, 0.1, 0, 0)]
    group = Group(7, Task("sum/1", "tools", {}), [t], 0)
    spans = told(
        Admitted(7, "sum/1", 0),
        GroupFinished(7, "sum/1", 0, True, "", [1.0], [2]),
        GroupsTaken(1, 0, [group]),
        StepDone(1, 1, {"score/reward_mean": 0.5}, {"wait": 3.0, "train": 1.0, "step": 4.0}, {}),
    )
    above = {
        "step 1": "run",
        "wait": "step 1",
        "train": "step 1",
        "group": "run",
        "generate": "group",
        "score": "group",
    }
    inside = {"chat", "execute_tool search", "execute_tool chat"}  # a tool may have any name
    above |= {"trajectory 7.0": "generate", **dict.fromkeys(inside, "trajectory 7.0")}
    assert spans.keys() == above.keys() | {"run"}
    for name, parent in above.items():
        assert spans[name].parent.span_id == spans[parent].context.span_id, name
    length = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert length["wait"] == pytest.approx(3.0) and length["step 1"] == pytest.approx(4.0)
    assert spans["wait"].end_time == pytest.approx(spans["train"].start_time, abs=1000)
    assert length["chat"] == pytest.approx(2.0) and length["trajectory 7.0"] == pytest.approx(2.5)
    chat, tool = spans["chat"].attributes, spans["execute_tool search"].attributes
    assert (chat["gen_ai.operation.name"], chat["gen_ai.usage.input_tokens"], chat["gen_ai.usage.output_tokens"]) == (
        "chat",
        3,
        2,
    )
    assert (tool["gen_ai.operation.name"], tool["gen_ai.tool.name"]) == ("execute_tool", "search")
    assert spans["trajectory 7.0"].attributes["rondel.reward"] == 1.0
    agent = spans["trajectory 7.0"].attributes
    assert (agent["gen_ai.usage.input_tokens"], agent["gen_ai.usage.output_tokens"]) == (3, 2)
    assert agent["rondel.turns"] == 1
    assert {told["gen_ai.provider.name"] for told in (chat, agent)} == {"rondel"}, "which the conventions require"


def test_names_are_those_of_the_package_of_conventions():
    """Every gen_ai name that is written is one that OpenTelemetry has."""
    import inspect
    import re

    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    from rondel.runtime.telemetry import otel

    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    assert set(re.findall(r'"(gen_ai\.[a-z_.]+)"', inspect.getsource(otel))) <= known


def test_what_is_in_flight_at_the_end_is_told_as_unfinished():
    assert told(Admitted(3, "sum/1", 0))["group"].attributes["rondel.reason"] == "unfinished"


@pytest.mark.parametrize("how", ["raises", "says no"])
def test_a_collector_that_fails_is_said_once_and_stops_nothing(how):
    from opentelemetry.sdk.trace.export import SpanExporter

    class Broken(SpanExporter):
        def export(self, spans):
            if how == "raises":
                raise OSError("nobody listens")
            return SpanExportResult.FAILURE

    said = []
    end = subscribe(lambda event: said.append(event) if isinstance(event, Warned) else None)
    try:
        traces = TraceExporter(Broken(), "runs/x", "tiny")
        for number in range(3):
            traces.on_event(Admitted(number, "sum/1", 0))
            traces.on_event(GroupFinished(number, "sum/1", 0, False, "unanimous", [], []))
            traces._provider.force_flush()
        traces.on_event(Admitted(9, "sum/1", 0))
        traces.close()
    finally:
        end()
    assert len(said) == 1 and "traces cannot be sent" in said[0].message


class Slow(InMemorySpanExporter):
    """A collector that takes a batch now and then."""

    def __init__(self, fails=False):
        super().__init__()
        self.fails, self.tries, self.ended = fails, 0, threading.Event()

    def export(self, spans):
        self.tries += 1
        self.ended.wait(0.05)
        return SpanExportResult.FAILURE if self.fails else super().export(spans)

    def shutdown(self):
        self.ended.set()


def group_of(number, answers, turns):
    """A group whose answers have so many turns, each with a call of a tool; spans: 3 + answers · (1 + 2 · turns)."""
    made = []
    for _ in range(answers):
        made.append(t := Trajectory(score=Score(1.0)))
        t.extend([1, 2])
        t.extend([3], logprobs=[-1.0], versions=[0])
        t.laps += [
            lap for i in range(turns) for lap in (("chat", 100.0 + i, 0.5, 2, 1), ("search", 100.5 + i, 0.5, 0, 0))
        ]
    return Group(number, Task(f"sum/{number}", "tools", {}), made, 0)


@pytest.fixture
def said():
    found = []
    end = subscribe(lambda event: found.append(event.message) if isinstance(event, Warned) else None)
    yield found
    end()


def test_a_step_of_many_turns_arrives_whole_at_a_slow_collector(said):
    """More spans at once than the SDK keeps by itself."""
    groups, slow = [group_of(number, 16, 4) for number in range(32)], Slow()
    traces = TraceExporter(slow, "runs/x", "tiny")
    for group in groups:
        traces.on_event(Admitted(group.id, group.task.id, 0))
        traces.on_event(GroupFinished(group.id, group.task.id, 0, True, "", [1.0], [1]))
    traces.on_event(GroupsTaken(1, 0, groups))
    traces.close()
    assert len(slow.get_finished_spans()) == 1 + 32 * (3 + 16 * 9) and said == []


def test_spans_for_which_there_is_no_room_are_counted(said, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    slow = Slow()
    traces = TraceExporter(slow, "runs/x", "tiny")
    for number in range(1999):
        traces.on_event(Admitted(number, "sum/1", 0))
        traces.on_event(GroupFinished(number, "sum/1", 0, False, "unanimous", [], []))
    traces.close()
    [message], sent = said, len(slow.get_finished_spans())
    assert sent < 2000 and f"{2000 - sent} of the 2000 spans" in message


def test_a_collector_that_is_down_at_the_end_is_said_and_tried_once(said):
    """And not at all where the batch before has failed."""
    slow = Slow(fails=True)
    traces = TraceExporter(slow, "runs/x", "tiny")
    for number in range(399):
        traces.on_event(Admitted(number, "sum/1", 0))
        traces.on_event(GroupFinished(number, "sum/1", 0, False, "unanimous", [], []))
    assert said == []
    traces.close()
    assert slow.tries == 1 and ["400 of the 400 spans" in message for message in said] == [True]
    slow = Slow(fails=True)
    traces = TraceExporter(slow, "runs/x", "tiny")
    for number in range(2):
        traces.on_event(Admitted(number, "sum/1", 0))
        traces.on_event(GroupFinished(number, "sum/1", 0, False, "unanimous", [], []))
        traces._provider.force_flush()
    traces.close()
    assert slow.tries == 2 and slow.ended.is_set(), "it was known before the end"


def test_what_ended_in_an_error_has_its_status():
    from opentelemetry.trace import StatusCode

    group = group_of(7, 2, 1)
    group.trajectories[1].outcome = PolicyFault("called a tool that is not there")
    memory = InMemorySpanExporter()
    traces = TraceExporter(memory, "runs/x", "tiny")
    for event in (
        Admitted(7, "sum/7", 0),
        GroupFinished(7, "sum/7", 0, True, "", [1.0], [1]),
        GroupsTaken(1, 0, [group]),
    ):
        traces.on_event(event)
    with pytest.raises(RuntimeError), ExitStack() as ends:
        ends.callback(traces.close)
        raise RuntimeError("the disk is full")
    spans = {span.name: span for span in memory.get_finished_spans()}
    told = {name: (span.status.status_code, span.attributes.get("error.type")) for name, span in spans.items()}
    assert told["trajectory 7.0"] == (StatusCode.UNSET, None)
    assert told["trajectory 7.1"] == (StatusCode.ERROR, "PolicyFault") and told["run"] == (
        StatusCode.ERROR,
        "RuntimeError",
    )
    assert spans["run"].status.description == "the disk is full"
    assert told["group"] == (StatusCode.UNSET, None)


def test_nobody_asked_and_what_was_asked_wrongly(monkeypatch):
    assert traces_of("", "runs/x", "tiny") is None
    with pytest.raises(ConfigError, match="not an address of OTLP"):
        traces_of("collector:4318", "runs/x", "tiny")
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="needs OpenTelemetry"):
        traces_of("http://127.0.0.1:4318", "runs/x", "tiny")
    monkeypatch.setenv(ADDRESSES[1], "http://127.0.0.1:4318")
    assert traces_of("", "runs/x", "tiny") is None, "a variable of the machine's is no reason to stop"


class Collector(http.server.ThreadingHTTPServer):
    """POST /v1/traces with a protobuf body, as OTLP has it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans, self.resources = [], []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        from gzip import decompress

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *args): ...


@pytest.mark.slow
def test_a_real_run_arrives_at_a_real_receiver(tmp_path):
    collector = Collector()
    try:
        address = f"http://127.0.0.1:{collector.server_port}"
        run(tmp_path, loop__warmup__steps=0, loop__steps=2, run__sinks=[{"kind": "opentelemetry", "url": address}])
    finally:
        collector.shutdown()
        collector.server_close()
    spans = collector.spans
    names = [span.name for span in spans]
    assert {
        "run",
        "step 1",
        "step 2",
        "wait",
        "train",
        "sync",
        "group",
        "generate",
        "score",
        "chat",
        "evaluation",
    } <= set(names)
    assert names.count("train") == 2 and names.count("group") >= 2 and len({span.trace_id for span in spans}) == 1
    known = {span.span_id for span in spans}
    assert all(span.parent_span_id in known for span in spans if span.name != "run"), "nobody's parent is missing"
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in spans)
    assert collector.resources[0]["service.name"] == "rondel" and collector.resources[0]["rondel.run.folder"] == str(
        tmp_path
    )
