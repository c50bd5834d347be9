"""What a training run reads, answers, stores and fits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.data.collection import answer_limits, render_all
from service.data.training_rows import Dataset
from service.engines.base import Engine
from service.prompts import PromptFormat
from service.trainer.options import MIXTURE, TrainOptions
from service.trainer.prepare import labels_itself
from service.trainer.training_set import (
    ASKED_ALONE,
    WITH_OWN_ANSWERS,
    forms_of,
    no_fact_count,
    sample_prompts,
)

SAMPLED = 300  # questions whose rows in forms stand for those of all


@dataclass(frozen=True)
class Volume:
    """What a run reads, answers, stores and fits."""

    answered_rows: float  # prompts that the model answers
    answered_tokens: float  # of these prompts
    usual_answers: float  # these answers, a longer one by its limit: one of twice counts as two
    read_rows: float  # prompts that are read and not answered
    read_tokens: float
    training_rows: float
    fitted_rows: float  # training rows that get a label
    no_fact_rows: float
    test_rows: float
    sampled_rows: float = 0.0  # prompts of which the model samples several answers
    sampled_tokens: float = 0.0  # of these prompts

    @property
    def rows(self) -> float:
        """Return all prompts that are read."""
        return self.answered_rows + self.read_rows


@dataclass(frozen=True)
class Sampled:
    """A sample of questions as the run asks them."""

    prompts: tuple[tuple[int, ...], ...]  # token ids, in a drawn order
    rows: float  # rows of one question
    tokens: float  # mean of a row
    answer_length: float  # mean limit of an answer, in usual ones
    alone: float  # mean tokens of a question by itself
    no_fact: float  # mean tokens of a request that asks for no fact

    def volume(
        self,
        options: TrainOptions,
        questions: int,
        held_out: int,
        chat: bool,
        *,
        held_out_sampled: bool = False,
    ) -> Volume:
        """Return what a run with so many questions reads.

        ``held_out_sampled``: the held-out ones are labelled by the model itself, too."""
        names = {form.name for form in forms_of(options, "chat" if chat else "text")}
        own = bool(names & set(WITH_OWN_ANSWERS))
        alone = sum(min(ASKED_ALONE, count) for count in (questions, held_out)) if own else 0
        mixture = options.wanted_forms == (MIXTURE,)
        no_fact = no_fact_count(questions) if mixture and chat else 0
        train, test = questions * self.rows, held_out * self.rows
        sampled_rows = train + held_out_sampled * test if options.answers == "self" else 0.0
        return Volume(
            answered_rows=alone + train + test,
            answered_tokens=alone * self.alone + (train + test) * self.tokens,
            usual_answers=alone + (train + test) * self.answer_length,
            read_rows=no_fact,
            read_tokens=no_fact * self.no_fact,
            training_rows=train + no_fact,
            fitted_rows=train,
            no_fact_rows=no_fact,
            test_rows=test,
            sampled_rows=sampled_rows,
            sampled_tokens=sampled_rows * self.tokens,
        )


def sampled(
    options: TrainOptions, dataset: Dataset, engine: Engine, prompt_format: PromptFormat
) -> Sampled:
    """Return a sample of the questions of ``dataset`` in the forms that the options name."""
    draw = random.Random(f"{options.shuffles[0]} trial")
    positions = sorted(draw.sample(range(len(dataset)), min(SAMPLED, len(dataset))))
    sample = sample_prompts(options, dataset.part(positions), engine, prompt_format)
    draw.shuffle(sample.questions)
    return Sampled(
        prompts=tuple(map(tuple, sample.questions)),
        rows=len(sample.questions) / len(positions),
        tokens=_mean_length(sample.questions),
        answer_length=sample.answer_length,
        alone=_mean_length(sample.alone),
        no_fact=_mean_length(sample.no_fact),
    )


def _mean_length(prompts: Sequence[Sequence[int]]) -> float:
    return float(np.mean([len(prompt) for prompt in prompts])) if prompts else 0.0


def as_they_are(
    options: TrainOptions,
    dataset: Dataset,
    test: Dataset | None,
    engine: Engine,
    prompt_format: PromptFormat,
) -> Volume:
    """Return what a run reads whose rows are those of the files."""
    generate = options.generates
    reserve = options.answer_tokens if generate else 0
    answered_rows = answered_tokens = usual_answers = read_rows = read_tokens = 0.0
    sampled_rows = sampled_tokens = 0.0
    for data in filter(None, (dataset, test)):
        lengths = render_all(engine, data, prompt_format, reserve).lengths
        asking = lengths[data.asking] if generate else lengths[:0]
        answered_rows += len(asking)
        answered_tokens += asking.sum()
        if generate:
            usual_answers += answer_limits(data, reserve).sum() / reserve
        read_rows += len(lengths) - len(asking)
        read_tokens += lengths.sum() - asking.sum()
        if options.answers == "self" and (data is dataset or labels_itself(data, options)):
            sampled_rows += len(asking)
            sampled_tokens += asking.sum()
        if not generate and options.answer_probes and engine.reads_answers:
            given = [row for row, each in enumerate(data.rows) if each.answer]
            read_rows += len(given)
            read_tokens += lengths[given].sum() + options.answer_tokens * len(given)
    asking_rows = len(dataset.asking)
    return Volume(
        answered_rows=answered_rows,
        answered_tokens=float(answered_tokens),
        usual_answers=float(usual_answers),
        read_rows=read_rows,
        read_tokens=float(read_tokens),
        training_rows=len(dataset),
        fitted_rows=asking_rows,
        no_fact_rows=len(dataset) - asking_rows,
        test_rows=0 if test is None else len(test),
        sampled_rows=sampled_rows,
        sampled_tokens=float(sampled_tokens),
    )
