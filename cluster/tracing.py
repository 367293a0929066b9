"""Sends calls as OpenTelemetry traces to a collector; imported only where one is configured.

A call's spans are written when it is over, with the times that were noted on its way: nothing is done for a trace while
tokens flow.
"""

from __future__ import annotations

from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvorum.cluster.calls import CANCELLED, Call
from kvorum.cluster.spans import part_spans, request_span

# A collector that is away must not keep a router from stopping.
_EXPORT_TIMEOUT_S = 2.0


class Tracing:
    """Writes calls to a span processor; a call whose client sent a traceparent goes on with that trace."""

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create({"service.name": "kvorum", "service.version": version("kvorum")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvorum")
        self._propagator = TraceContextTextMapPropagator()

    def export(self, call: Call) -> None:
        """Write the spans of a call that is over."""

        def at_ns(time_s: float) -> int:
            return call.started_ns + round(1e9 * (time_s - call.started_s))

        whole = request_span(call)
        root = self._tracer.start_span(
            whole.name,
            context=self._propagator.extract(call.headers),
            kind=SpanKind.SERVER,
            attributes=whole.attributes,
            start_time=at_ns(whole.start_s),
        )
        if not root.is_recording():
            return
        context = set_span_in_context(root)
        for part in part_spans(call):
            span = self._tracer.start_span(
                part.name, context=context, attributes=part.attributes, start_time=at_ns(part.start_s)
            )
            for event in part.events:
                span.add_event(event.name, event.attributes, timestamp=at_ns(event.at_s))
            span.end(at_ns(part.end_s))
        for event in whole.events:
            root.add_event(event.name, event.attributes, timestamp=at_ns(event.at_s))
        if call.error_code and call.error_code != CANCELLED:
            root.set_status(Status(StatusCode.ERROR, call.error_code))
        root.end(at_ns(whole.end_s))

    def flush(self) -> None:
        """Send what there is; returns when it is sent or cannot be."""
        self._provider.force_flush(round(1e3 * _EXPORT_TIMEOUT_S))

    def close(self) -> None:
        """Send what is left; returns when it is sent or cannot be."""
        self._provider.shutdown()


def open_tracing(endpoint: str) -> Tracing:
    """Return tracing to a collector that speaks OTLP over gRPC at an http:// or https:// address."""
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)))
