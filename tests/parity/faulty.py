"""Workers with a mistake in them, which the start-up self-test and the comparison have to find.

--worker-cls tests.parity.faulty.RowTooEarly"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from service.engines.vllm import worker
from service.engines.vllm.reader import AnswerRow, OnsetRow, StepLayout, answer_rows, onset_rows
from service.engines.vllm.wire import Directive, probe_digest
from service.engines.vllm.worker import Worker
from service.readout import Site


class Deaf(Worker):
    """Keeps its first probes: what a graph would do that was compiled with them as constants."""

    def hallutracer_write(self, slot: int, site: str, head: list[int], numbers: bytes) -> None:
        written = self.__dict__.setdefault("written", set())
        if (slot, site) not in written:
            super().hallutracer_write(slot, site, head, numbers)
            written.add((slot, site))
        reader = self.hallutracer_reader
        reader.digests[reader.plan.column(Site(site), slot)] = probe_digest(site, head, numbers)


class Bare(Worker):
    """Runs without the readout: what a stale compile cache would give, or a graph captured as a
    whole."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for module in self.model_runner.model.modules():
            if type(module).__name__.startswith("Reading"):
                module.__class__ = next(
                    base for base in type(module).__mro__ if "Reading" not in base.__name__
                )
            if "forward" in vars(getattr(module, "impl", module)):
                del module.impl.forward


def too_early(step: StepLayout, directive_of: Callable[[str], Directive | None]) -> list[OnsetRow]:
    return [
        replace(row, token_row=max(0, row.token_row - 1)) for row in onset_rows(step, directive_of)
    ]


def answers_too_early(step: StepLayout, read: Mapping[str, Directive]) -> list[AnswerRow]:
    return [replace(row, token_row=max(0, row.token_row - 1)) for row in answer_rows(step, read)]


def swapped(step: StepLayout, directive_of: Callable[[str], Directive | None]) -> list[OnsetRow]:
    rows = onset_rows(step, directive_of)
    if len(rows) < 2:
        return rows
    first, second, *others = rows
    return [
        replace(first, token_row=second.token_row),
        replace(second, token_row=first.token_row),
        *others,
    ]


class RowTooEarly(Worker):
    """Reads the row before t*: another prompt's, or the last but one."""

    rows = staticmethod(too_early)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        worker.onset_rows = self.rows  # in this worker's process only
        super().load_model(*args, **kwargs)


class Swapped(RowTooEarly):
    """Where two prompts end in one step, each gets the other's reading."""

    rows = staticmethod(swapped)


class AnswersTooEarly(Worker):
    """Reads the row before an answer's token: another request's."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        worker.answer_rows = answers_too_early
        super().load_model(*args, **kwargs)
