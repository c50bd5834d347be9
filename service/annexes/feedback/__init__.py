"""Feedback: a service keeps its answers' risks and takes what users say of the answers.

How they lie in a database is in ``service/feedback``, which ``hallutracer recalibrate`` reads,
too."""

from __future__ import annotations

from service.annexes import Annex

FEEDBACK_ROUTE = "/v1/feedback"

ANNEX = Annex(
    name="feedback",
    options="service.annexes.feedback.options:FeedbackOptions",
    commands={
        "feedback": (
            "service.annexes.feedback.command:feedback",
            (
                "List the answers that the service drew at random and that have no label yet,"
                " oldest first, as JSON lines."
            ),
        )
    },
    after="recalibrate",
    routers=("service.annexes.feedback.feedback_routes:router",),
    score_routes=(FEEDBACK_ROUTE,),
)
