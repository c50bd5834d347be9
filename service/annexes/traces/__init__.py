"""OpenTelemetry traces of requests, and their risks as events, sent to a collector."""

from __future__ import annotations

from service.annexes import Annex

ANNEX = Annex(name="traces", options="service.annexes.traces.options:TraceOptions")
