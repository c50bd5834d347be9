"""Writes, reads and deletes the rows of feedback: scored prompts, and callers' labels of their
answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from service.errors import RequestError
from service.feedback.databases import Database

Label = Literal["factual", "hallucinated", "unclear"]
LABELS: tuple[Label, ...] = get_args(Label)
Standing = Literal["new", "repeated", "changed"]
CONTINUE = "continue"  # the decision to give an answer of this model
MOST_LABELS = 100  # by one caller for one answer
CHUNK = 1_000  # answers deleted at once


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored prompt.  The prompts of a request differ by ``index`` (in the database
    ``place``)."""

    uid: str  # random; a batch that is written twice is stored once
    request_id: str
    index: int
    caller: str
    time: float  # Unix, seconds
    route: str
    model: str
    bundle: str  # name:version
    digest: str  # of the bundle
    probes: str  # sha256 of its probes; versions with the same probes have the same signals
    policy: str
    threshold: float
    risk: float
    flagged: bool
    decision: str
    signals: Mapping[str, float]  # the classifier's input, by name
    mark: str  # digest of the prompt, to recognise repeats and training rows
    prompt: str | None = None  # as JSON; only if the operator wants it
    drawn: bool = (
        False  # whether it was drawn at random among the answers that a guarantee is about
    )


@dataclass(frozen=True, slots=True)
class Given:
    """A label that a caller gives to the answer with this id."""

    request_id: str
    index: int
    caller: str
    any_caller: bool  # whether the caller may also label answers to other callers
    label: Label
    comment: str | None
    time: float


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a bundle's drawn answers: one for each different prompt, up to the newest with a
    label."""

    drawn: int
    labelled: int  # answers with a clear label on which callers agree
    wrong: int  # hallucinated ones of these


@dataclass(frozen=True, slots=True)
class Stored:
    """A label that is on disk, with the record of its answer."""

    standing: Standing  # relative to this caller's earlier labels of this answer
    conflict: bool  # another caller gave another label
    decision: str
    flagged: bool
    model: str
    bundle: str
    drawn: bool = False
    tally: Tally | None = (
        None  # of the bundle's drawn answers, if this label is new and of such an answer
    )

    @property
    def answered(self) -> bool:
        """Whether there was an answer of this model to judge."""
        return self.decision == CONTINUE


_FIELDS = [field.name for field in fields(Answer)]
_COLUMNS = ", ".join(_FIELDS).replace("index", "place")
_WRITE = (
    f"INSERT INTO hallutracer_answers ({_COLUMNS}) VALUES ({', '.join('?' * len(_FIELDS))}) ON"
    " CONFLICT DO NOTHING"
)
# A client may choose the ids of its requests, so ids may repeat: take the caller's own answer
# first, then the newest.
_FIND = """SELECT uid, decision, flagged, model, bundle, digest, drawn FROM hallutracer_answers
WHERE request_id = ? AND place = ? AND (caller = ? OR ? = 1)
ORDER BY CASE WHEN caller = ? THEN 0 ELSE 1 END, time DESC, uid LIMIT 1"""


def write_answers(database: Database, answers: Sequence[Answer]) -> None:
    """Write answers, inside a transaction; an answer that exists already stays unchanged."""
    if answers:
        database.run_many(_WRITE, list(map(_columns, answers)))


def _columns(answer: Answer) -> list[Any]:
    return [_column(getattr(answer, name)) for name in _FIELDS]


def _column(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return json.dumps(dict(value)) if isinstance(value, Mapping) else value


def write_label(database: Database, submitted: Given) -> Stored | None:
    """Write a label, inside a transaction; return None if this caller has no such answer.

    Raises RequestError if the caller has given too many labels to this answer."""
    caller = submitted.caller
    values = (submitted.request_id, submitted.index, caller, int(submitted.any_caller), caller)
    answers = database.run(_FIND, values)
    if not answers:
        return None
    uid, decision, flagged, model, bundle, digest, drawn = answers[0]
    query = "SELECT caller, label, comment FROM hallutracer_labels WHERE answer = ? ORDER BY number"
    history = database.run(query, (uid,))
    own_labels = [(label, comment) for labeller, label, comment in history if labeller == caller]
    same = bool(own_labels) and own_labels[-1][0] == submitted.label
    if not (same and submitted.comment in (None, own_labels[-1][1])):
        if len(own_labels) >= MOST_LABELS:
            raise RequestError(
                f"this answer has {MOST_LABELS} labels of yours: the last one stands", param="id"
            )
        database.run(
            "INSERT INTO hallutracer_labels (answer, caller, label, comment, time) VALUES (?, ?, ?,"
            " ?, ?)",
            (uid, caller, submitted.label, submitted.comment, submitted.time),
        )
    other_labels = {
        labeller: label for labeller, label, _ in history if labeller != caller
    }  # the last of each
    conflict = submitted.label != "unclear" and bool(
        set(other_labels.values()) - {submitted.label, "unclear"}
    )
    standing: Standing = "repeated" if same else "changed" if own_labels else "new"
    tally = tally_of(database, digest) if drawn and not same else None
    return Stored(standing, conflict, decision, bool(flagged), model, bundle, bool(drawn), tally)


def tally_of(database: Database, digest: str) -> Tally:
    """Count the labels of the answers that were drawn under the bundle of this digest."""
    by_prompt: dict[
        str, dict[tuple[str, str], str]
    ] = {}  # prompt -> answer and caller -> last label
    newest = -math.inf
    labels = (
        "SELECT mark, uid, l.caller, label, a.time FROM hallutracer_labels l JOIN"
        " hallutracer_answers a ON answer = uid WHERE digest = ? AND drawn = 1 ORDER BY number"
    )
    for mark, uid, caller, label, time in database.run(labels, (digest,)):
        by_prompt.setdefault(mark, {})[uid, caller] = label
        newest = max(newest, time)
    if not by_prompt:
        return Tally(0, 0, 0)
    count = (
        "SELECT COUNT(DISTINCT mark) FROM hallutracer_answers WHERE digest = ? AND drawn = 1 AND"
        " time <= ?"
    )
    [(drawn,)] = database.run(count, (digest, newest))
    clear = [set(of_prompt.values()) - {"unclear"} for of_prompt in by_prompt.values()]
    agreed = [next(iter(of_prompt)) for of_prompt in clear if len(of_prompt) == 1]
    return Tally(drawn, len(agreed), agreed.count("hallucinated"))


def to_label(database: Database) -> Iterator[dict[str, Any]]:
    """Yield drawn answers without a label, oldest first, one for each prompt of a bundle.

    Their risk is left out, since it would bias the labels."""
    seen: set[tuple[str, str]] = set()
    answers = database.run("""SELECT request_id, place, time, bundle, digest, mark, prompt,
EXISTS (SELECT 1 FROM hallutracer_labels WHERE answer = uid) AS labelled
FROM hallutracer_answers WHERE drawn = 1 ORDER BY labelled DESC, time, place, uid""")
    for request_id, index, time, bundle, digest, mark, prompt, labelled in answers:
        if not labelled and (digest, mark) not in seen:
            request = {} if prompt is None else {"given": json.loads(prompt)}
            yield {"id": request_id, "index": index, "time": time, "bundle": bundle, **request}
        seen.add((digest, mark))


def believed_time(database: Database, clock: float, most: float) -> float:
    """Return and store the time by which answers age.  It moves towards ``clock``, by at most
    ``most`` s a call.

    It begins at the earlier of the clock and the newest answer, and is never before the oldest
    answer."""
    with database.transaction():
        [(oldest, newest)] = database.run(
            "SELECT (SELECT MIN(time) FROM hallutracer_answers), (SELECT MAX(time) FROM"
            " hallutracer_answers)"
        )
        stored = database.run("SELECT believed FROM hallutracer_retention WHERE number = 1")
        if oldest is None:  # there is nothing to lose
            believed = clock
        elif stored:
            [(before,)] = stored
            believed = max(before + max(-most, min(most, clock - before)), min(clock, oldest))
        else:
            believed = min(clock, newest)
        database.run(
            "INSERT INTO hallutracer_retention (number, believed) VALUES (1, ?) "
            "ON CONFLICT (number) DO UPDATE SET believed = excluded.believed",
            (believed,),
        )
    return min(clock, believed)


def delete_before(database: Database, time: float) -> bool:
    """Delete some answers from before ``time``, with prompts and labels; return whether more may be
    left."""
    with database.transaction():
        uids = database.run(
            "SELECT uid FROM hallutracer_answers WHERE time < ? ORDER BY time LIMIT ?",
            (time, CHUNK),
        )
        if uids:
            database.run_many("DELETE FROM hallutracer_answers WHERE uid = ?", uids)
    return len(uids) == CHUNK


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """A stored answer and the result of its labels."""

    signals: dict[str, float]
    risk: float  # the served risk
    bundle: str
    decision: str
    flagged: bool
    mark: str
    time: float
    label: (
        int | None
    )  # 1 factual, 0 hallucinated; None without a clear label, or with a ``conflict``
    conflict: bool  # callers disagree
    unclear: bool  # every label is "unclear"

    @property
    def usable(self) -> bool:
        """Whether it has a label, and the label is about an answer of this model."""
        return self.label is not None and self.decision == CONTINUE


def read_answers(database: Database, probes: str) -> list[LabelledAnswer]:
    """Return every stored answer that was scored by these probes, oldest first, with each caller's
    last label."""
    answers = database.run(
        "SELECT uid, signals, risk, bundle, decision, flagged, mark, time FROM hallutracer_answers "
        "WHERE probes = ? ORDER BY time, uid",
        (probes,),
    )
    labels_of = (
        "SELECT answer, caller, label FROM hallutracer_labels WHERE answer IN "
        "(SELECT uid FROM hallutracer_answers WHERE probes = ?) ORDER BY number"
    )
    by_answer: dict[str, dict[str, str]] = {}
    for uid, caller, label in database.run(labels_of, (probes,)):
        by_answer.setdefault(uid, {})[caller] = label
    labelled = []
    for uid, signals, risk, bundle, decision, flagged, mark, time in answers:
        labels = set(by_answer.get(uid, {}).values())
        clear = labels - {"unclear"}
        verdict = int(clear == {"factual"}) if len(clear) == 1 else None
        labelled.append(
            LabelledAnswer(
                json.loads(signals),
                risk,
                bundle,
                decision,
                bool(flagged),
                mark,
                time,
                verdict,
                len(clear) > 1,
                labels == {"unclear"},
            )
        )
    return labelled
