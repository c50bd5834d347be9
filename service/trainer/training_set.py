"""Makes the training rows: sets aside the sample that the bundle carries, and asks in forms of
conversation."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from probes_store.local import atomic_write
from service.data.collection import collect, render_all
from service.data.forms import (
    FORMS,
    Form,
    Message,
    chosen,
    in_forms,
    is_one_message,
    read_model_answers,
)
from service.data.forms.crossed import (
    PLAIN_WORDING,
    RELATIONS,
    held_out_families,
    in_wordings,
    training_families,
)
from service.data.forms.several import no_fact_rows, several_rows
from service.data.forms.tasks import task_rows, written_rows
from service.data.judges import normalise, parts_of
from service.data.run_folder import IN_FORMS
from service.data.training_rows import Dataset, Row, missing_groups, read_dataset
from service.engines.base import Engine
from service.errors import RequestError, TrainingError
from service.judging.evaluation import MOST_TOKENS, Sample, SampleQuestion
from service.prompts import PromptFormat, render
from service.trainer.options import MIXTURE, Console, TrainOptions

SAMPLE_SIZE = 48  # questions
LEAST_SAMPLE = 8  # questions; with fewer the bundle carries no sample
SAMPLE_SHARE = 0.05  # most of the training rows that the sample may take
JUDGES_OF_PARTS = ("contains", "openai")  # those that can judge an answer to several questions
JUDGES = ("contains", "exact")  # those that a service has: they need no endpoint and no pattern
LONGEST = 400  # characters of a question that a table can show
ASKED_ALONE = (
    600  # questions that the model answers alone, for earlier messages with its own answers
)
WITH_OWN_ANSWERS = ("turn_own", "turns_own")
# patterns are for the judge alone: no passage or earlier message states them
ANSWERS, PATTERNS = "answers", "patterns"
# requests that ask for no fact: a share of the questions, and a least number
TASKS, LEAST_TASKS = 0.25, 240
FIRST = "first"  # folder of a first bundle's rows
FIRST_ROWS, LEAST_FOR_FIRST = 1000, 3000  # of a first bundle, and of a run that has one
MEASURED_TASKS = 120  # of them, whose mean length stands for all
# shares of these requests: written one by one; looking like questions, as key words and follow-ups
WRITTEN_SHARE, LIKE_QUESTIONS = 2 / 5, 1 / 5
REWORDED, WORDINGS_EACH = 0.25, 3  # share of the questions that are reworded, and wordings of each
# share of the questions that are also asked among others, as follow-ups or inside a task
SEVERAL = 0.16
SET_ASIDE = 0.05  # share of the questions that are only the other ones of such messages
_PLAIN = ("lone", PLAIN_WORDING)  # forms that leave a question as it is
LONGEST_REWORDED = 240  # characters; longer questions are not reworded


def draw_sample(
    options: TrainOptions, dataset: Dataset, test: Dataset | None, console: Console
) -> tuple[Dataset, Sample | None]:
    """Return the training rows and the sample, which is drawn from the held-out rows, else from the
    training rows."""
    judge = options.judge_name if options.generates else "contains"
    if not options.keep_sample or judge not in JUDGES or options.answer_pattern:
        return dataset, None
    source, room = (
        (dataset, int(SAMPLE_SHARE * len(dataset))) if test is None else (test, len(test))
    )
    sizes = np.bincount(source.groups)
    positions = []
    for position in _alternating_kinds(source, random.Random(options.shuffles[0])):
        size = 1 if test is not None else int(sizes[source.groups[position]])
        if size <= room:
            room -= size
            positions.append(position)
    positions = positions[:SAMPLE_SIZE]
    if len(positions) < LEAST_SAMPLE:
        return dataset, None
    if test is None:
        left = dataset.part(
            np.flatnonzero(~np.isin(dataset.groups, dataset.groups[positions])).tolist()
        )
        if options.answers == "given" and missing_groups(left, options.folds):
            return dataset, None
        console.print(
            f"{len(positions)} questions are left out of training and kept in the bundle for"
            f" `hallutracer try` ({len(dataset) - len(left)} rows; --no-sample)"
        )
        dataset = left
    rows = [source.rows[position] for position in positions]
    length = min(options.answer_tokens, MOST_TOKENS)
    questions = tuple(
        SampleQuestion(row.texts[0], row.answers, row.strata.get("kind", "")) for row in rows
    )
    return dataset, Sample(
        source.origin.path.name, judge, options.abstains.pattern, length, questions
    )


def _can_be_shown(row: Row) -> bool:
    """Return whether a row is one short question with accepted answers."""
    lone = row.prompt is not None or [message["role"] for message in row.messages or ()] == ["user"]
    if not row.applies or not lone or len(row.texts[0]) > LONGEST:
        return False
    return bool(row.answers) and parts_of(row.answers) is None and all(map(normalise, row.answers))


def _alternating_kinds(source: Dataset, draw: random.Random) -> list[int]:
    """Return rows in a drawn order, each of another group: the first of each kind, the second of
    each, ...

    A group with several forms gives a plain question, if it has one."""
    order = [position for position, row in enumerate(source.rows) if _can_be_shown(row)]
    draw.shuffle(order)
    order.sort(
        key=lambda position: source.rows[position].strata.get("form", _PLAIN[0]) not in _PLAIN
    )
    first = {
        int(source.groups[position]): position for position in reversed(order)
    }  # of each group
    by_kind: dict[str, list[int]] = defaultdict(list)
    for position in order:
        if first[int(source.groups[position])] == position:
            by_kind[source.rows[position].strata.get("kind", "")].append(position)
    rounds = zip_longest(*by_kind.values())
    return [position for of_round in rounds for position in of_round if position is not None]


@dataclass(frozen=True)
class Fits:
    """Checks whether the model can take the messages of a form, and counts the refusals by form.

    A model's context may be too short, and its template may refuse a system prompt."""

    engine: Engine
    prompt_format: PromptFormat
    reserve: int  # tokens of the answer
    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def __call__(self, form: Form, messages: list[Message]) -> bool:
        """Return whether the model takes messages of this form, and count it."""
        fine = self.takes(messages, self.reserve)
        self.tried[form.name] += 1
        self.refused[form.name] += not fine
        return fine

    def takes(self, messages: list[Message], reserve: int = 0) -> bool:
        """Return whether the model can render these messages and has room for ``reserve`` more
        tokens."""
        if not all(
            message["content"].strip() for message in messages
        ):  # a form may leave nothing of "?!"
            return False
        row = as_asked({"messages": messages}, self.prompt_format)
        try:
            ids = render(self.engine, row.get("prompt"), row.get("messages"), self.prompt_format)
        except RequestError:
            return False
        return len(ids) + reserve <= self.engine.identity.max_tokens

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the forms that the model always refused."""
        return tuple(
            sorted(name for name, count in self.tried.items() if self.refused[name] == count)
        )

    def described(self) -> str | None:
        """Return a line that names the forms that did not fit, or None."""
        shown = [
            f"{name} {count} of {self.tried[name]}"
            for name, count in self.refused.most_common()
            if count
        ]
        limit = self.engine.identity.max_tokens
        text = (
            f"beyond the model's {limit} tokens or its chat template, so asked in other forms:"
            f" {', '.join(shown)}"
        )
        return text if shown else None


def spread(
    options: TrainOptions,
    dataset: Dataset,
    test: Dataset | None,
    engine: Engine,
    prompt_format: PromptFormat,
    console: Console,
) -> tuple[Dataset, Dataset | None]:
    """Return training and held-out rows in the forms that the options name; unchanged if they name
    none.

    The run folder gets the files, and the model's answers to lone questions.
    Raises DataError for rows that do not fit the model by themselves, TrainingError for forms that
    need a template."""
    if not options.wanted_forms:
        return dataset, test
    forms = _forms(options, prompt_format, console)
    fits = Fits(engine, prompt_format, options.answer_tokens)
    dataset = _in_forms(options, dataset, "train", forms, fits, console)
    test = None if test is None else _in_forms(options, test, "test", forms, fits, console)
    if line := fits.described():
        console.print(line)
    return replace(dataset, left_out_forms=fits.left_out), test


def forms_of(options: TrainOptions, prompt_format: PromptFormat) -> list[Form]:
    """Return the forms that the options name; without a chat template those of a single
    message."""
    forms = _named_forms(options)
    return forms if prompt_format == "chat" else [form for form in forms if is_one_message(form)]


def _named_forms(options: TrainOptions) -> list[Form]:
    if not options.wanted_forms:
        return []
    return chosen(["all"] if options.wanted_forms == (MIXTURE,) else options.wanted_forms)


def _forms(options: TrainOptions, prompt_format: PromptFormat, console: Console) -> list[Form]:
    single = forms_of(options, prompt_format)
    if prompt_format == "chat":
        return single
    forms = _named_forms(options)
    if options.wanted_forms == (MIXTURE,):
        console.print(
            "prompts are plain text, without a chat template: questions take forms of a single"
            " message only"
        )
    elif len(single) < len(forms):
        names = ", ".join(form.name for form in forms if form not in single)
        raise TrainingError(
            "prompts are plain text, without a chat template: leave out forms of several messages,"
            f" {names}",
            param="forms",
        )
    return single


def _in_forms(
    options: TrainOptions,
    dataset: Dataset,
    name: str,
    forms: Sequence[Form],
    fits: Fits,
    console: Console,
) -> Dataset:
    render_all(
        fits.engine, dataset, fits.prompt_format, fits.reserve
    )  # names lines that are too long by themselves
    model_answers: dict[str, str] = {}
    if any(form.name in WITH_OWN_ANSWERS for form in forms):
        model_answers = _own_answers(options, dataset, f"{name}-said", fits)
    rows = _objects(options, dataset)
    seed = options.shuffles[0]
    formed = in_forms(rows, forms, seed=seed, model_answers=model_answers, fits=fits)
    ids = {row["id"] for row in formed}
    left = [row for row in rows if ids.isdisjoint(_possible_ids(row, forms))]
    formed += in_forms(left, [FORMS["lone"]])  # rows that fit no form are asked alone
    if left:
        console.print(
            f"{len(left):,} rows of {dataset.path.name} fit none of the forms and are asked alone"
        )
    mixture = options.wanted_forms == (MIXTURE,)
    if mixture:
        formed = _also_in_other_words(options, rows, formed, name, fits)
    if name == "train" and mixture and fits.prompt_format == "chat" and not len(dataset.others):
        formed += _no_fact_requests(no_fact_count(len(dataset)), seed, fits)
    formed = list(map(_with_answers, formed))
    path = options.folder / IN_FORMS.format(name)
    lines = [
        json.dumps(as_asked(row, fits.prompt_format), ensure_ascii=False)
        for row in _with_unique_ids(formed)
    ]
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
    result = replace(read_dataset(path, options.answers, folds=None), made_of=dataset)
    forms_met = {row.strata["form"] for row in result.rows if row.applies}
    added = len(result.others) - len(dataset.others)
    console.print(
        f"{len(result.asking):,} rows of {dataset.path.name} in {len(forms_met)} forms"
        + (f", and {added:,} requests that ask for no fact" if added else "")
        + f": {path}"
    )
    return result


@dataclass(frozen=True)
class FirstPart:
    """The training rows of a first bundle, of which the bundle of all is the next version."""

    options: TrainOptions  # one shuffle of the folds is enough to look at it
    dataset: Dataset
    positions: list[int]  # in the whole training set


def has_first_bundle(options: TrainOptions, rows: float) -> bool:
    """Return whether a run of so many training rows publishes a first bundle.

    Given labels need one prefill a row, so the whole bundle is not far off."""
    return options.answers == "generate" and rows >= LEAST_FOR_FIRST


def first_part(options: TrainOptions, dataset: Dataset) -> FirstPart | None:
    """Return the rows of the first bundle; None where the run has none, or was begun without."""
    if not has_first_bundle(options, len(dataset)):
        return None
    begun = options.folder / "train" / "run.json"
    if begun.exists() and '"earlier"' not in begun.read_text(encoding="utf-8"):
        return None
    seed = options.shuffles[0]
    positions = first_rows(dataset, seed)
    changes: dict[str, Any] = {"forms": "none", "logit_scale": options.scale, "seeds": (seed,)}
    few = replace(options, run_dir=options.folder / FIRST, **changes)
    return FirstPart(few, dataset.part(positions), positions)


def first_rows(dataset: Dataset, seed: int) -> list[int]:
    """Return positions of at most ``FIRST_ROWS`` rows: whole groups, in a drawn order."""
    names, member = np.unique(dataset.groups, return_inverse=True)
    rank = np.random.default_rng(seed).permutation(len(names))[member]
    inside = np.cumsum(np.bincount(rank)) <= FIRST_ROWS
    return [int(position) for position in np.flatnonzero(inside[rank])]


def no_fact_count(questions: int) -> int:
    """Return how many requests that ask for no fact the mixture adds to so many questions."""
    return max(LEAST_TASKS, round(TASKS * questions))


def _no_fact_requests(count: int, seed: int, fits: Fits) -> list[dict[str, Any]]:
    """Return up to so many requests that ask for no fact, without those that the model cannot
    take."""
    alike, written = round(LIKE_QUESTIONS * count), round(WRITTEN_SHARE * count)
    requests = [
        *task_rows(count - alike - written, seed),
        *no_fact_rows(alike, (), seed),
        *written_rows(written, seed),
    ]
    return [row for row in requests if fits.takes(row["messages"])]


class SamplePrompts(NamedTuple):
    """Token ids of questions as a run asks them, and of some requests that ask for no fact."""

    questions: list[list[int]]  # in forms
    alone: list[list[int]]
    no_fact: list[list[int]]
    answer_length: float  # mean limit of the answers to ``questions``, in usual ones


def sample_prompts(
    options: TrainOptions, dataset: Dataset, engine: Engine, prompt_format: PromptFormat
) -> SamplePrompts:
    """Return these questions as the run asks them.

    Where a form repeats the model's own earlier answer, a text of that length stands in for it."""
    fits, seed = Fits(engine, prompt_format, options.answer_tokens), options.shuffles[0]
    rows = _objects(options, dataset)
    lone = in_forms(rows, [FORMS["lone"]])
    questions, no_fact = lone, []
    if forms := forms_of(options, prompt_format):
        answers = {row["id"]: "word " * (options.answer_tokens // 2) for row in rows}
        questions = in_forms(rows, forms, seed=seed, model_answers=answers, fits=fits)
        if options.wanted_forms == (MIXTURE,):
            questions = _also_in_other_words(options, rows, questions, "train", fits)
            no_fact = _no_fact_requests(MEASURED_TASKS, seed, fits)

    def rendered(rows: Sequence[dict[str, Any]]) -> list[list[int]]:
        rows = [as_asked(row, prompt_format) for row in rows]
        return [
            render(engine, row.get("prompt"), row.get("messages"), prompt_format) for row in rows
        ]

    if prompt_format != "chat":
        no_fact = []
    usual = options.answer_tokens
    limits = [_limit(row, usual) for row in questions]
    return SamplePrompts(
        rendered(questions), rendered(lone), rendered(no_fact), float(np.mean(limits)) / usual
    )


def _objects(options: TrainOptions, dataset: Dataset) -> list[dict[str, Any]]:
    """Return the rows as objects of their file, with the groups after near-duplicates were
    joined."""
    key = PATTERNS if options.judge == "regex" else ANSWERS
    pairs = zip(dataset.rows, group_names(dataset), strict=True)
    return [_object(row, group, key) for row, group in pairs]


def _possible_ids(row: dict[str, Any], forms: Sequence[Form]) -> set[str]:
    """Return the ids that ``in_forms`` may give to a row."""
    return {row["id"], *(f"{row['id']}+{form.name}" for form in forms)}


def _limit(row: dict[str, Any], usual: int) -> int:
    """Return the most tokens of the row's answer."""
    named: int = row.get("answer_tokens", 0)
    return max(usual, named)


def _with_answers(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its patterns under the key of answers."""
    return {ANSWERS if key == PATTERNS else key: value for key, value in row.items()}


def _also_in_other_words(
    options: TrainOptions,
    rows: Sequence[dict[str, Any]],
    formed: Sequence[dict[str, Any]],
    name: str,
    fits: Fits,
) -> list[dict[str, Any]]:
    """Return the rows in forms, and those that the mixture adds to them: questions in other words,
    and beside another question, as follow-ups or inside a task.

    The other questions are those of a share of the groups that is set aside, whose rows are left
    out, so that no label depends on a fact of another fold.  Held-out rows get wordings and texts
    that no training row has."""
    seed = options.shuffles[0]
    short = [
        row
        for row in rows
        if 0 < len(row.get("prompt", "")) < LONGEST_REWORDED and "applies" not in row
    ]
    formed = [*formed, *_reworded(short, formed, name, seed, fits)]
    can_judge = options.answers == "generate" and options.judge_name in JUDGES_OF_PARTS
    if not can_judge or fits.prompt_format != "chat":
        return formed
    answerable = [row for row in short if row.get(ANSWERS)]
    sizes = Counter(row["group"] for row in rows)
    aside, drawn = _set_aside_and_drawn(answerable, sizes, seed)
    among = several_rows(
        [row for row in answerable if row["group"] in drawn],
        [row for row in answerable if row["group"] in aside],
        seed=seed,
        test=name == "test",
    )
    kept = [row for row in formed if row["group"] not in aside]
    return kept + [row for row in among if fits.takes(row["messages"], _limit(row, fits.reserve))]


def _reworded(
    asking: Sequence[dict[str, Any]],
    formed: Sequence[dict[str, Any]],
    name: str,
    seed: int,
    fits: Fits,
) -> list[dict[str, Any]]:
    """Return a share of the questions in several wordings each, so that a probe cannot mistake a
    wording for knowledge."""
    drawn = random.Random(f"{seed} reworded").sample(asking, round(REWORDED * len(asking)))
    families = training_families() if name == "train" else held_out_families()
    taken = {row["messages"][0]["content"] for row in formed if len(row.get("messages", ())) == 1}
    wordings = in_wordings(drawn, families, per_row=WORDINGS_EACH, seed=seed, taken=taken)
    return [row for row in wordings if fits.takes(row["messages"], fits.reserve)]


def _set_aside_and_drawn(
    rows: Sequence[dict[str, Any]], sizes: Counter[str], seed: int
) -> tuple[set[str], set[str]]:
    """Return the groups that are set aside, and those whose questions are asked among others."""
    groups = sorted({row["group"] for row in rows})
    random.Random(f"{seed} among others").shuffle(groups)
    aside = _beginning(groups, sizes, SET_ASIDE)
    return aside, _beginning([group for group in groups if group not in aside], sizes, SEVERAL)


def _beginning(groups: Sequence[str], sizes: Counter[str], share: float) -> set[str]:
    """Return the first groups that together have at most this share of all rows; one that is too
    large is passed over."""
    room = round(share * sizes.total())
    taken = set()
    for group in groups:
        if sizes[group] <= room:
            taken.add(group)
            room -= sizes[group]
    return taken


def _own_answers(
    options: TrainOptions, dataset: Dataset, folder: str, fits: Fits
) -> dict[str, str]:
    """Return the model's answers to some of the lone questions, by id; resumes from ``folder`` in
    the run."""
    lone = [
        position
        for position, row in enumerate(dataset.rows)
        if row.prompt is not None and row.applies
    ]
    draw = random.Random(f"{options.shuffles[0]} said")
    positions = sorted(draw.sample(lone, min(len(lone), ASKED_ALONE)))
    if not positions:
        return {}
    collection = collect(
        fits.engine,
        dataset.part(positions),
        options.folder / folder,
        sites=(options.site,),
        prompt_format=fits.prompt_format,
        batch_rows=options.batch_rows,
        max_new_tokens=options.answer_tokens,
    )
    return read_model_answers(collection.folder / "answers.jsonl")


def group_names(dataset: Dataset) -> list[str]:
    """Return the group of each row after near-duplicates were joined: the group or else the id of
    its first row."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for row, number in zip(dataset.rows, dataset.groups.tolist(), strict=True):
        if number in names:
            continue
        names[number] = row.group or row.id
        while names[number] in taken:  # an id may equal the name of another group
            names[number] += "+"
        taken.add(names[number])
    return [names[number] for number in dataset.groups.tolist()]


def _object(row: Row, group: str, key: str) -> dict[str, Any]:
    """Return a row as an object of its file, with this group, and with its answers under
    ``key``."""
    question = {"messages": row.messages} if row.prompt is None else {"prompt": row.prompt}
    answers: dict[str, Any] = {} if row.applies else {"applies": False}
    if row.applies and row.answers:
        answers[key] = list(row.answers)
    stated = {"statement": row.statement} if row.statement else {}
    if row.relation in RELATIONS and row.subject and row.statement and row.prompt is not None:
        stated |= {"relation": row.relation, "subject": row.subject}
    return {"id": row.id, "group": group} | row.strata | question | answers | stated


def as_asked(row: dict[str, Any], prompt_format: PromptFormat) -> dict[str, Any]:
    """Return the row as it is rendered: without a chat template a single message becomes a
    prompt."""
    if prompt_format == "chat" or "messages" not in row or len(row["messages"]) > 1:
        return row
    [message] = row["messages"]
    return {key: value for key, value in row.items() if key != "messages"} | {
        "prompt": message["content"]
    }


def _with_unique_ids(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with ids that all differ: a file may have a row "a+lone" besides "a"."""
    seen: set[str] = set()
    renamed = []
    for row in rows:
        name = row["id"]
        while name in seen:
            name += "+"
        seen.add(name)
        renamed.append(row | {"id": name})
    return renamed
