"""The risks of traced requests as events: ``gen_ai.evaluation.result`` of OpenTelemetry's GenAI
conventions.

    hallucination_risk    of a prompt, before its answer
    answer_risk           of the finished answer, by its own tokens

An event is a log record with a name, sent over OTLP to ``--otlp-logs-endpoint``.  It belongs to the
span of what the model did, and never holds a prompt or an answer."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.util.types import AttributeValue

from service import __version__
from service.scoring import RiskReport
from service.turn import AnswerRisk

NAME = "gen_ai.evaluation.result"
PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "not_applicable"  # the labels
Attributes = dict[str, AttributeValue]


class EvaluationEvents:
    """One service's events, on their way to a collector."""

    def __init__(self, endpoint: str, resource: Resource) -> None:
        """The rest is said by OTEL_* variables."""
        # As of spans: who calls ``shutdown`` bounds the end, and not the library.
        provider = LoggerProvider(resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter(endpoint)))
        self._logger = provider.get_logger("hallutracer", __version__)
        self.shutdown = provider.shutdown

    def send(self, span: Context, at_ns: int, attributes: Attributes) -> None:
        """Queue one event below ``span``."""
        self._logger.emit(timestamp=at_ns, context=span, event_name=NAME, attributes=attributes)


def of_prompt(report: RiskReport) -> Attributes:
    """Return what is told of a prompt's risk."""
    verdict, applies = report.verdict, report.context.said is None or report.context.applies
    why = [f"threshold {verdict.threshold:g}", f"decision {report.decision.value}"]
    why += ["outside training"] if report.uncertain.outside else []
    why += [] if applies else ["asks for no fact"]
    label = FAIL if verdict.flagged else PASS if applies else NOT_APPLICABLE
    return _result("hallucination_risk", report.risk, label, why)


def of_answer(answer: AnswerRisk, threshold: float) -> Attributes:
    """Return what is told of a finished answer's risk."""
    why = [f"threshold {threshold:g}", f"{answer.tokens} tokens read"]
    return _result("answer_risk", answer.risk, FAIL if answer.flagged else PASS, why)


def of_failure(code: str) -> Attributes:
    """Return what is told of a prompt that got no risk."""
    return {"gen_ai.evaluation.name": "hallucination_risk", "error.type": code}


def _result(name: str, risk: float, label: str, why: list[str]) -> Attributes:
    return {
        "gen_ai.evaluation.name": name,
        "gen_ai.evaluation.score.value": risk,
        "gen_ai.evaluation.score.label": label,
        "gen_ai.evaluation.explanation": "; ".join(why),
    }
