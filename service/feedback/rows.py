"""What is stored of a scored prompt and of what callers say of its answer; how that is written, read and deleted."""

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
CONTINUE = "continue"  # the decision after which an answer of this model was given
MOST_LABELS = 100  # of one answer by one caller
CHUNK = 1_000  # answers deleted at once


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored prompt.  A request of several has one each, told apart by ``index`` (in the database ``place``)."""

    uid: str  # drawn here: a batch that is written twice is there once
    request_id: str
    index: int
    caller: str
    time: float  # Unix, seconds
    route: str
    model: str
    bundle: str  # name:version
    digest: str  # of the bundle
    probes: str  # sha256 of its probes: versions that share them share their signals
    policy: str
    threshold: float
    risk: float
    flagged: bool
    decision: str
    signals: Mapping[str, float]  # what the classifier read, by name
    mark: str  # digest of the prompt: tells repeats, and rows of training
    prompt: str | None = None  # as JSON; only where the operator asked for it
    drawn: bool = False  # at random, when it was given, of the answers that a guarantee is about


@dataclass(frozen=True, slots=True)
class Given:
    """A label for the answer with this id, as a caller gave it."""

    request_id: str
    index: int
    caller: str
    others: bool  # whether the caller may label answers to other callers
    label: Label
    comment: str | None
    time: float


@dataclass(frozen=True, slots=True)
class Tally:
    """What labels say of a bundle's drawn answers: one for each different prompt, up to the newest with a label."""

    drawn: int
    labelled: int  # of these; unclear ones and those that callers disagree about count neither here nor as wrong
    wrong: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A label that is on disk, beside what was known of its answer."""

    standing: Standing  # of this caller's labels of this answer
    conflict: bool  # another caller says otherwise
    decision: str
    flagged: bool
    model: str
    bundle: str
    drawn: bool = False
    tally: Tally | None = None  # of the bundle's drawn answers, where this label is of one and says something new

    @property
    def answered(self) -> bool:
        """Whether there was an answer of this model to judge."""
        return self.decision == CONTINUE


_FIELDS = [field.name for field in fields(Answer)]
_COLUMNS = ", ".join(_FIELDS).replace("index", "place")
_WRITE = f"INSERT INTO hallutracer_answers ({_COLUMNS}) VALUES ({', '.join('?' * len(_FIELDS))}) ON CONFLICT DO NOTHING"
# A client may choose the ids of its requests: its own come first, and of those the last.
_FIND = """SELECT uid, decision, flagged, model, bundle, digest, drawn FROM hallutracer_answers
WHERE request_id = ? AND place = ? AND (caller = ? OR ? = 1)
ORDER BY CASE WHEN caller = ? THEN 0 ELSE 1 END, time DESC, uid LIMIT 1"""


def write_answers(database: Database, answers: Sequence[Answer]) -> None:
    """Write answers, inside a transaction; one that is there already stays as it is."""
    if answers:
        database.run_many(_WRITE, [[_column(getattr(one, name)) for name in _FIELDS] for one in answers])


def _column(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else json.dumps(dict(value)) if isinstance(value, Mapping) else value


def write_label(database: Database, given: Given) -> Stored | None:
    """Write a label, inside a transaction; return None where no such answer is known to this caller.

    Raises RequestError where one caller labels one answer again and again."""
    found = database.run(_FIND, (given.request_id, given.index, given.caller, int(given.others), given.caller))
    if not found:
        return None
    uid, decision, flagged, model, bundle, digest, drawn = found[0]
    said = "SELECT caller, label, comment FROM hallutracer_labels WHERE answer = ? ORDER BY number"
    history = database.run(said, (uid,))
    own = [(label, comment) for caller, label, comment in history if caller == given.caller]
    same = bool(own) and own[-1][0] == given.label
    if not (same and given.comment in (None, own[-1][1])):
        if len(own) >= MOST_LABELS:
            raise RequestError(f"this answer has {MOST_LABELS} labels of yours: the last one stands", param="id")
        database.run(
            "INSERT INTO hallutracer_labels (answer, caller, label, comment, time) VALUES (?, ?, ?, ?, ?)",
            (uid, given.caller, given.label, given.comment, given.time),
        )
    others = {caller: label for caller, label, _ in history if caller != given.caller}  # the last of each
    conflict = given.label != "unclear" and any(other not in (given.label, "unclear") for other in others.values())
    standing: Standing = "repeated" if same else "changed" if own else "new"
    tally = tally_of(database, digest) if drawn and not same else None
    return Stored(standing, conflict, decision, bool(flagged), model, bundle, bool(drawn), tally)


def tally_of(database: Database, digest: str) -> Tally:
    """Return what labels say of the answers that were drawn under the bundle of this digest."""
    said: dict[str, dict[tuple[str, str], str]] = {}  # by prompt: of each answer and caller the last label
    newest = -math.inf
    labels = (
        "SELECT mark, uid, l.caller, label, a.time FROM hallutracer_labels l JOIN hallutracer_answers a "
        "ON answer = uid WHERE digest = ? AND drawn = 1 ORDER BY number"
    )
    for mark, uid, caller, label, time in database.run(labels, (digest,)):
        said.setdefault(mark, {})[uid, caller] = label
        newest = max(newest, time)
    if not said:
        return Tally(0, 0, 0)
    count = "SELECT COUNT(DISTINCT mark) FROM hallutracer_answers WHERE digest = ? AND drawn = 1 AND time <= ?"
    [(drawn,)] = database.run(count, (digest, newest))
    verdicts = [set(labels.values()) - {"unclear"} for labels in said.values()]
    return Tally(drawn, sum(len(one) == 1 for one in verdicts), sum(one == {"hallucinated"} for one in verdicts))


def to_label(database: Database) -> Iterator[dict[str, Any]]:
    """Yield drawn answers without a label, oldest first, one for each prompt of a bundle; not the risk: it biases."""
    seen: set[tuple[str, str]] = set()
    answers = database.run("""SELECT request_id, place, time, bundle, digest, mark, prompt,
EXISTS (SELECT 1 FROM hallutracer_labels WHERE answer = uid) AS labelled
FROM hallutracer_answers WHERE drawn = 1 ORDER BY labelled DESC, time, place, uid""")
    for request_id, index, time, bundle, digest, mark, prompt, labelled in answers:
        if not labelled and (digest, mark) not in seen:
            given = {} if prompt is None else {"given": json.loads(prompt)}
            yield {"id": request_id, "index": index, "time": time, "bundle": bundle, **given}
        seen.add((digest, mark))


def believed_time(database: Database, clock: float, most: float) -> float:
    """Return the time by which answers grow old, and store it: it goes towards ``clock``, by at most ``most`` s a call.

    At first it is the clock's or the newest answer's, the earlier one; and never earlier than the oldest's."""
    with database.transaction():
        [(oldest, newest)] = database.run(
            "SELECT (SELECT MIN(time) FROM hallutracer_answers), (SELECT MAX(time) FROM hallutracer_answers)"
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
    """Delete some answers from before ``time``, with prompts and labels; return whether there may be more."""
    with database.transaction():
        found = database.run("SELECT uid FROM hallutracer_answers WHERE time < ? ORDER BY time LIMIT ?", (time, CHUNK))
        if found:
            database.run_many("DELETE FROM hallutracer_answers WHERE uid = ?", found)
    return len(found) == CHUNK


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """A stored answer and what its labels come to."""

    signals: dict[str, float]
    risk: float  # as it was served
    bundle: str
    decision: str
    flagged: bool
    mark: str
    time: float
    label: int | None  # 1 factual, 0 hallucinated; None: nobody said, or see ``conflict``
    conflict: bool  # callers disagree
    unclear: bool  # whoever looked could not tell

    @property
    def usable(self) -> bool:
        """Whether its label is about an answer of this model."""
        return self.label is not None and self.decision == CONTINUE


def read_answers(database: Database, probes: str) -> list[LabelledAnswer]:
    """Return every stored answer that was scored by these probes, oldest first, with each caller's last label."""
    answers = database.run(
        "SELECT uid, signals, risk, bundle, decision, flagged, mark, time FROM hallutracer_answers "
        "WHERE probes = ? ORDER BY time, uid",
        (probes,),
    )
    labels_of = (
        "SELECT answer, caller, label FROM hallutracer_labels WHERE answer IN "
        "(SELECT uid FROM hallutracer_answers WHERE probes = ?) ORDER BY number"
    )
    said: dict[str, dict[str, str]] = {}
    for uid, caller, label in database.run(labels_of, (probes,)):
        said.setdefault(uid, {})[caller] = label
    found = []
    for uid, signals, risk, bundle, decision, flagged, mark, time in answers:
        labels = set(said.get(uid, {}).values())
        clear = labels - {"unclear"}
        verdict = int(clear == {"factual"}) if len(clear) == 1 else None
        found.append(
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
    return found
