"""What an answer has to be: JSON of a schema, which decoding is held to token by token.

llguidance makes the grammar, for both engines; it builds automata as they are needed, and counts a
part of the cost.  A schema comes from a request, and may cost gigabytes and minutes all the same:
its size is bounded here, and it is compiled and followed in a process of its own
(``grammar_process``), which has limits of memory and of CPU time."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, finalize

from service.engines import grammar_process
from service.engines.grammar_process import BEGIN, COMMAND, COMPLETE, END, FAILED, MASK, REPLY
from service.errors import EngineError, Overloaded, RequestError
from service.tool_calls import deeper_than

MOST_CHARACTERS = 32_768  # of a schema's JSON
MOST_LEVELS = 64  # of its lists and objects
MOST_REPEATS = 5_000  # of items, characters or properties: each costs the grammar a symbol
# patterns, where schemas are combined: time is exponential in how many are intersected
MOST_COMBINED = 4
# characters of a pattern, its repeats written out: each token may look at all of them
MOST_WRITTEN_OUT = 10_000
_REPEATS = (
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
    "minContains",
)
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")
_CHECKED = frozenset((*_REPEATS, *_COMBINE, "pattern", "patternProperties", "x-guidance"))
_BESIDE = frozenset(
    ("$defs", "definitions", "title", "description", "default", "examples", "$schema", "$id")
)
# A fifth and less of the library's own: tens of milliseconds for a grammar, a few for a step.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
CPU_S = 2.0  # of a format's process, for its grammar, and again for each token
MEMORY = 64 << 20  # bytes of a format's process, besides what it has when it begins
MASKS = 64  # of two answers, before an engine gets a schema whose masks it computes itself
# That a caller's answers may have the engine wait for their masks: at once, and besides for each
# token and second.
WAIT_S = 0.5
WAIT_PER_TOKEN_S = 0.02
WAIT_SHARE = 0.05
MAX_REMEMBERED = 4096  # callers whose waiting is
START_S = 120.0  # for the tokenizer's table
MAX_LIVE, MAX_LIVE_OF_CALLER = 64, 16  # formats that are in use


@dataclass(frozen=True, slots=True)
class Format:
    """The JSON schema of an answer; ``param``: the request's field that it came in."""

    schema: str
    param: str
    # ``Grammars.prepared``'s, of one engine
    compiled: Compiled | None = field(default=None, compare=False, repr=False)


def check_schema(schema: Mapping[str, Any]) -> str:
    """Return a schema's JSON.  Raises ValueError for one that is larger than anybody needs."""
    if deeper_than(schema, MOST_LEVELS):
        raise ValueError(f"a schema has at most {MOST_LEVELS} levels of lists and objects here")
    written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    if len(written) > MOST_CHARACTERS:
        raise ValueError(f"a schema has at most {MOST_CHARACTERS} characters here")
    # of thousands, few as a rule
    objects = [part for part in _objects(schema) if not _CHECKED.isdisjoint(part)]
    for item in objects:
        for name in _REPEATS:
            if isinstance(many := item.get(name), int | float) and many > MOST_REPEATS:
                raise ValueError(f"'{name}' is at most {MOST_REPEATS} here")
        by_pattern = item.get("patternProperties")
        for pattern in (
            item.get("pattern"),
            *(by_pattern if isinstance(by_pattern, Mapping) else ()),
        ):
            if isinstance(pattern, str) and written_out(pattern) > MOST_WRITTEN_OUT:
                raise ValueError(
                    f"a pattern has at most {MOST_WRITTEN_OUT} characters here, its repeats"
                    " written out"
                )
        if "x-guidance" in item:
            raise ValueError("'x-guidance' is no keyword of JSON schema")
    if any(map(_combines, objects)):
        try:
            patterns = _Patterns(schema).of(schema)
        except RecursionError:
            raise ValueError("the chain of references is too long") from None
        if patterns > MOST_COMBINED:
            raise ValueError(
                f"at most {MOST_COMBINED} patterns and formats are taken where schemas are"
                f" combined ({', '.join(_COMBINE)} with others): one text may have to match them"
                " all"
            )
    return written


_PARTS = re.compile(
    r"(?P<repeat>\{\s*(?P<least>\d{1,10})\s*(?:,\s*(?P<most>\d{0,10})\s*)?\})|"
    r"\\[pPux]\{[^}]{0,64}\}|\\.|.",
    re.DOTALL,
)


def written_out(pattern: str) -> int:
    """Return how many characters and classes a regular expression has once its counted repeats are
    written out."""
    sizes, last = [0], 0  # of the groups that are open; of what a repeat would repeat
    in_class = False
    for part in _PARTS.finditer(pattern):
        if in_class:
            in_class = part[0] != "]"
        elif part["repeat"]:
            repeats = max(int(part["most"] or part["least"]), 1)
            sizes[-1] += last * (repeats - 1)
            last = min(last * repeats, 10**20)  # no number of thousands of digits
        elif part[0] == "(":
            sizes.append(0)
            last = 0
        elif part[0] == ")":
            # one that closes nothing is refused by the grammar's maker
            last = sizes.pop() if len(sizes) > 1 else 0
            sizes[-1] += last
        elif part[0] not in "|*+?":
            last, in_class = 1, part[0] == "["
            sizes[-1] += 1
    return sum(sizes)


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            yield item
            pending += item.values()
        elif isinstance(item, list):
            pending += item


def _combines(schema: Mapping[str, Any]) -> bool:
    """Return whether an answer has to be of several schemas at once."""
    constraints = schema.keys() - _BESIDE
    every = schema.get("allOf")
    return (isinstance(every, list) and len(every) > 1) or (
        len(constraints) > 1 and any(name in schema for name in _COMBINE)
    )


class _Patterns:
    """Counts the expressions of a schema, those that are referred to each time."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # by reference; 0 while it is being counted, so that a cycle ends
        self._known: dict[str, int] = {}

    def of(self, value: Any) -> int:
        """Return how many there are.  Raises ValueError for a reference to elsewhere,
        RecursionError for a long chain.

        ``properties`` may be called as the keywords are, so nothing but texts counts as one."""
        if isinstance(value, list):
            return sum(map(self.of, value))
        if not isinstance(value, Mapping):
            return 0
        here = sum(isinstance(value.get(name), str) for name in ("pattern", "format"))
        by_pattern = value.get("patternProperties")
        here += len(by_pattern) if isinstance(by_pattern, Mapping) else 0
        reference = value.get("$ref")
        named = self._named(reference) if isinstance(reference, str) else 0
        return (
            here
            + named
            + sum(
                self.of(part)
                for name, part in value.items()
                if name not in ("$defs", "definitions")
            )
        )

    def _named(self, reference: str) -> int:
        if reference not in self._known:
            self._known[reference] = 0
            self._known[reference] = self.of(self._target(reference))
        return self._known[reference]

    def _target(self, reference: str) -> Any:
        """Return what a JSON pointer points to; nothing where nothing is there, which the grammar's
        maker refuses."""
        if not re.fullmatch(r"#(/[^%]*)?", reference):
            raise ValueError("a '$ref' where schemas are combined is '#' or '#/..', without %")
        target: Any = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name) if isinstance(target, Mapping) else None
        return target


def refused(wanted: Format, failure: str) -> RequestError:
    """Return the error for a schema that cannot be used."""
    reason = " ".join(failure.split())[:300]
    return RequestError(
        f"{wanted.param}: the schema cannot be compiled: {reason}", param=wanted.param
    )


class Waiting:
    """How long the engine still waits for the masks of a caller's answers.  On the engine's
    thread."""

    def __init__(self) -> None:
        self._left, self._at = WAIT_S, time.monotonic()

    def left(self, more: float = 0.0) -> float:
        """Return the seconds; ``more``: of a token that was taken."""
        now = time.monotonic()
        self._left = min(self._left + WAIT_SHARE * (now - self._at) + more, WAIT_S)
        self._at = now
        return self._left

    def spend(self, seconds: float) -> None:
        """Count what the engine has waited."""
        self._left = max(self._left - seconds, 0.0)


class Compiled:
    """A schema that is compiled, in a process that ends where this is closed.  Answers: on the
    engine's thread."""

    def __init__(self, channel: socket.socket, waiting: Waiting) -> None:
        self.waiting = waiting
        self._channel, self.closed = channel, False
        # No __del__: while one runs, another thread would still get this from ``Grammars._live``.
        finalize(self, channel.close)
        self._numbers = count()
        # by answer, what came while another was waited for
        self._replies: dict[int, list[tuple[int, bytes]]] = {}

    def compile(self, wanted: Format, masks: int, seconds: float) -> None:
        """Wait at most so long for the grammar.  Raises RequestError; TimeoutError where the time
        is up."""
        self._channel.settimeout(None if seconds == math.inf else max(seconds, 0.001))
        try:
            order = {
                "schema": wanted.schema,
                "limits": LIMITS,
                "memory": MEMORY,
                "cpu_s": CPU_S,
                "masks": masks,
            }
            grammar_process.send_message(self._channel, order)
            failure = grammar_process.received_message(self._channel)
        except TimeoutError:
            raise
        except (EOFError, OSError):
            failure = (
                f"it takes more than {CPU_S:g} s of time or {MEMORY >> 20} MB of memory; make it"
                " smaller"
            )
        if failure:
            raise refused(wanted, failure)

    def begin(self) -> int:
        """Return the number of a new answer.  Raises EOFError, OSError where the process has
        ended."""
        answer = next(self._numbers)
        self._replies[answer] = []
        self._channel.sendall(COMMAND.pack(answer, BEGIN))
        return answer

    def take(self, answer: int, token: int) -> None:
        """Have an answer go on with a token.  Raises as ``begin`` does."""
        self._channel.sendall(COMMAND.pack(answer, token))

    def end(self, answer: int) -> None:
        """Free an answer."""
        self._replies.pop(answer, None)
        with suppress(OSError):
            self._channel.sendall(COMMAND.pack(answer, END))

    def reply(self, answer: int, seconds: float) -> tuple[int, bytes]:
        """Wait at most so long for an answer's next reply.  Raises as ``begin`` does, TimeoutError
        among them."""
        until = time.monotonic() + seconds
        while not self._replies[answer]:
            self._channel.settimeout(max(until - time.monotonic(), 0.001))
            whose, kind, size = REPLY.unpack(grammar_process.received(self._channel, REPLY.size))
            data = grammar_process.received(self._channel, size)
            if whose in self._replies:  # else it has ended
                self._replies[whose].append((kind, data))
        return self._replies[answer].pop(0)

    def close(self) -> None:
        """End the process.  On any thread; one that waits for a reply has EOFError."""
        self.closed = True
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)


class Grammars:
    """Formats for the answers of one tokenizer: a process with its table, and one of each format in
    use.

    Requests of one caller with one schema share it.  All methods are for any thread but an event
    loop's."""

    def __init__(
        self, tokenizer: Any, vocabulary: int, ends: frozenset[int], *, masks: int = 0
    ) -> None:
        """``vocabulary``: of the logits; ``ends``: tokens that end an answer, none: the tokenizer's
        own.

        ``masks``: so many of two answers are computed before a format is taken."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # Here, because it holds Python's lock: 50 ms for a large vocabulary.
        self._definition: str | None = None if backend is None else backend.to_str()
        self._vocabulary = max(vocabulary, len(tokenizer))
        end = tokenizer.eos_token_id
        self._ends = sorted(ends) or (None if end is None else [end])
        self._masks = masks
        self._waiting: dict[str, Waiting] = {}  # by caller
        self._live: WeakValueDictionary[tuple[str, str], Compiled] = WeakValueDictionary()
        self._compiling: dict[Compiled, str] = {}  # whose they are
        self._changing, self._starting = threading.Lock(), threading.Lock()
        # it starts when the first format comes
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def prepared(self, wanted: Format, caller: str = "", seconds: float = math.inf) -> Format:
        """Return a format that ``Held`` takes, compiled in at most so many seconds.

        Raises RequestError with the reason for one that cannot be, TimeoutError, Overloaded,
        EngineError."""
        key = caller, wanted.schema
        with self._changing:
            live = {
                key_of: compiled for key_of, compiled in self._live.items() if not compiled.closed
            }
            if key in live:
                return replace(wanted, compiled=live[key])
            callers = [*(whose for whose, _ in live), *self._compiling.values()]
            if (in_use := callers.count(caller)) >= MAX_LIVE_OF_CALLER or len(callers) >= MAX_LIVE:
                raise Overloaded(
                    f"{in_use} formats of this caller and {len(callers)} in all are in use; try"
                    " again in 1 s"
                )
        until = time.monotonic() + seconds
        channel = self._forked(wanted)
        with self._changing:
            compiled = Compiled(channel, self._waiting.setdefault(caller, Waiting()))
            if len(self._waiting) > MAX_REMEMBERED:
                del self._waiting[next(iter(self._waiting))]
            self._compiling[compiled] = caller
        try:
            self._check_open()
            compiled.compile(wanted, self._masks, until - time.monotonic())
            with self._changing:
                self._live[key] = compiled
        except BaseException:
            compiled.close()
            self._check_open()  # that is why, then
            raise
        finally:
            with self._changing:
                del self._compiling[compiled]
        return replace(wanted, compiled=compiled)

    def close(self) -> None:
        """End all processes; who waits for one has an error at once."""
        with self._changing:
            self._closed = True
            live = [*self._live.values(), *self._compiling]
            control = self._control
            process = self._process
        for compiled in live:
            compiled.close()
        if control is not None and process is not None:
            _end(control, process)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; load the model again")

    def _forked(self, wanted: Format) -> socket.socket:
        """Return the socket of a new process.  Raises RequestError, EngineError."""
        ours, theirs = socket.socketpair()
        with theirs:
            for _ in range(
                2
            ):  # it may have been killed: for all of the machine's memory, for example
                self._check_open()
                try:
                    with self._starting:
                        if self._process is None or self._process.poll() is not None:
                            self._start(wanted)
                        assert self._control is not None
                        socket.send_fds(self._control, [b"f"], [theirs.fileno()])
                    return ours
                except (OSError, EOFError):
                    continue
        ours.close()
        raise EngineError("the process that compiles formats cannot be started; try again")

    def _start(self, wanted: Format) -> None:
        """Start the process.  Raises RequestError, OSError, EOFError."""
        if self._definition is None:
            raise self._impossible(wanted, "only fast tokenizers are supported")
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            # Its modules are found where ours were; the main module is not run again.
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; from service.engines import"
                " grammar_process as process"
            )
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", f"{program}; process.main({descriptor})"],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        with self._changing:
            self._process = process
            self._control = ours
            closed = self._closed
            finalize(self, _end, ours, process)
        if closed:
            _end(ours, process)
        ours.settimeout(START_S)
        table = {"definition": self._definition, "vocabulary": self._vocabulary, "ends": self._ends}
        grammar_process.send_message(ours, table)
        if failure := grammar_process.received_message(ours):
            _end(ours, process)
            raise self._impossible(wanted, failure)

    @staticmethod
    def _impossible(wanted: Format, failure: str) -> RequestError:
        return RequestError(
            f"{wanted.param}: this model's tokenizer cannot be held to a format: {failure}",
            param=wanted.param,
        )


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # also where a thread waits for what comes
    process.kill()
    process.wait()


class Held:
    """One answer that is held to a format.  On the engine's thread, which waits for the process as
    little as it may."""

    def __init__(self, wanted: Format) -> None:
        """Raises RequestError where the format's process has ended."""
        assert wanted.compiled is not None, "Grammars.prepared makes it"
        self._asked, self._compiled = wanted, wanted.compiled
        self._waiting = self._compiled.waiting
        self._waiting.left(WAIT_PER_TOKEN_S)
        try:
            self._answer = self._compiled.begin()
        except OSError as error:
            raise self._ended(error) from error

    def allowed(self) -> bytes:
        """Return which tokens may come next, a bit for each.  Raises RequestError where it became
        too much to tell."""
        return self._reply()[1]

    def take(self, token: int) -> bool:
        """Note a token; return whether the answer is complete, and nothing may follow."""
        self._waiting.left(WAIT_PER_TOKEN_S)
        try:
            self._compiled.take(self._answer, token)
        except OSError as error:
            raise self._ended(error) from error
        while (kind := self._reply()[0]) == MASK:  # one that nobody has asked for
            pass
        return kind == COMPLETE

    def close(self) -> None:
        """Free what the answer has in its process."""
        self._compiled.end(self._answer)

    def _reply(self) -> tuple[int, bytes]:
        began = time.monotonic()
        try:
            kind, data = self._compiled.reply(self._answer, self._waiting.left())
        except (OSError, EOFError) as error:
            raise self._ended(error) from error
        finally:
            self._waiting.spend(time.monotonic() - began)
        if kind == FAILED:
            raise refused(self._asked, data.decode())
        return kind, data

    def _ended(self, error: Exception) -> RequestError:
        """Return the error for a process that has ended, or that has to, because it is late."""
        self._compiled.close()
        bounds = (
            f"{WAIT_S:g} s of time"
            if isinstance(error, TimeoutError)
            else f"{MEMORY >> 20} MB of memory"
        )
        return refused(
            self._asked,
            f"which tokens may come next takes more than {bounds} to tell; make it smaller",
        )
