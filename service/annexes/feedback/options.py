"""The options of feedback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from service.cli.options import FeedbackDatabase, UsageError
from service.settings import DEFAULT_DRAWN, Range, option, section

if TYPE_CHECKING:
    from service.annexes.feedback.store import Feedback
    from service.feedback.databases import Location
    from service.serving.metrics import Metrics


@section("Feedback", 37)
@dataclass(frozen=True, kw_only=True)
class FeedbackOptions:
    """Whether answers and what users say of them are kept, and where."""

    feedback_db: FeedbackDatabase = ""
    feedback_prompts: Annotated[bool, option("Keep the prompts too; needs --feedback-days.")] = (
        False
    )
    feedback_days: Annotated[
        float | None,
        option(
            "Delete an answer's row, prompt and labels after so many days.  Default: never.",
            limits=Range(positive=True),
        ),
    ] = None
    feedback_share: Annotated[
        float,
        option(
            "Share of the unflagged answers that is drawn at random; a guarantee is held against"
            " labels of these alone, which 'hallutracer feedback' lists.",
            limits=Range(0, 1),
        ),
    ] = DEFAULT_DRAWN

    def hooks(self) -> dict[str, Callable[[Metrics], Feedback | None]]:
        """Return what makes the ``feedback`` of a ``Service``.  Raises UsageError."""
        where = self.location()

        def opened(metrics: Metrics) -> Feedback | None:
            if where is None:
                return None
            from service.annexes.feedback.store import Feedback

            return Feedback(
                where,
                metrics,
                prompts=self.feedback_prompts,
                days=self.feedback_days,
                share=self.feedback_share,
            )

        return {"feedback": opened}

    def location(self) -> Location | None:
        """Return where feedback is kept; None: nowhere.  Raises UsageError."""
        if not self.feedback_db:
            for flag, is_set in (
                ("--feedback-prompts", self.feedback_prompts),
                ("--feedback-days", self.feedback_days),
                ("--feedback-share", self.feedback_share != DEFAULT_DRAWN),
            ):
                if is_set:
                    raise UsageError(flag, "needs --feedback-db")
            return None
        if self.feedback_prompts and self.feedback_days is None:
            raise UsageError(
                "--feedback-prompts",
                "needs --feedback-days: prompts are kept for a time, not for ever",
            )
        from service.feedback.databases import location

        return location(self.feedback_db)
