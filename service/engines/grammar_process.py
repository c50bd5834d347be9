"""The process that compiles the grammars of formats and computes their masks: what a request's
schema costs is not the service's own memory or time.

It holds the tokenizer's table, made once, and forks itself for each format, which is milliseconds;
the fork has limits of memory and CPU time, which the kernel keeps.  Nothing but llguidance is
imported: no thread runs where it forks."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any, NoReturn

LENGTH = struct.Struct("<I")  # bytes of a message that follow it
COMMAND = struct.Struct("<ii")  # number of an answer, and a token of it or one of the two below
BEGIN, END = -1, -2
REPLY = struct.Struct("<iBI")  # number of an answer, one of the four below, bytes that follow
_PR_SET_PDEATHSIG = 1
GOES_ON, COMPLETE, MASK, FAILED = range(4)
# As Python's json.dumps writes it: where whitespace is free, a small model decoded greedily may
# give nothing else.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def received(channel: socket.socket, size: int) -> bytes:
    """Return exactly so many bytes.  Raises EOFError where the other side has closed."""
    parts = bytearray()
    while len(parts) < size:
        if not (part := channel.recv(size - len(parts))):
            raise EOFError
        parts += part
    return bytes(parts)


def send_message(channel: socket.socket, message: object) -> None:
    """Send a JSON value."""
    data = json.dumps(message).encode()
    channel.sendall(LENGTH.pack(len(data)) + data)


def received_message(channel: socket.socket) -> Any:
    """Return a JSON value.  Raises EOFError where the other side has closed."""
    return json.loads(received(channel, LENGTH.unpack(received(channel, LENGTH.size))[0]))


def failure_of(schema: str, limits: dict[str, Any]) -> str:
    """Return why a JSON schema has no grammar, as far as is known without a tokenizer; "" where it
    may have one."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=SPACING)
        return str(LLMatcher.validate_grammar(grammar, limits=LLParserLimits(**limits)))
    except ValueError as error:
        return str(error)


def main(descriptor: int) -> None:
    """Make the table of the tokenizer that comes first, then a process for each socket that
    comes."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with the service, whose answers end first
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    control = socket.socket(fileno=descriptor)
    try:
        tokenizer = _tokenizer(**received_message(control))
    except ValueError as error:
        send_message(control, str(error))
        return
    send_message(control, "")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:  # the service has ended
            return
        with suppress(OSError):  # no memory for a fork: who waits sees that the socket is closed
            if not os.fork():
                control.close()
                _serve(socket.socket(fileno=descriptors[0]), tokenizer)
        os.close(descriptors[0])


def _tokenizer(definition: str, vocabulary: int, ends: list[int] | None) -> Any:
    from llguidance import LLTokenizer

    # Its own truncation and padding concern batches of texts.
    plain = json.dumps(json.loads(definition) | {"truncation": None, "padding": None})
    return LLTokenizer(plain, n_vocab=vocabulary, eos_token=ends)


def _serve(channel: socket.socket, tokenizer: Any) -> NoReturn:
    """Compile what comes first, then compute the masks of its answers until the other side
    closes."""
    status = 1
    try:
        with suppress(AttributeError):  # on Linux it ends with the process that it is a copy of
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Rust says there that it has no more memory, and aborts
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for default in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(default, signal.SIG_DFL)
        asked = received_message(channel)
        _limit_memory(asked["memory"])
        seconds: float = asked["cpu_s"]
        # SIGPROF ends a process that does not handle it
        signal.setitimer(signal.ITIMER_PROF, seconds)
        failure, matcher, first = _compiled(asked["schema"], asked["limits"], tokenizer)
        failure = failure or _failure_on_the_way(matcher, asked["masks"])
        send_message(channel, failure)
        if not failure:
            _answer(channel, matcher, first, seconds)
        status = 0
    except (EOFError, OSError):
        status = 0
    finally:
        os._exit(status)  # nothing of the process that it is a copy of may run here


def _limit_memory(more: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))


def _compiled(schema: str, limits: dict[str, Any], tokenizer: Any) -> tuple[str, Any, bytes]:
    from llguidance import LLMatcher, LLParserLimits

    if failure := failure_of(schema, limits):
        return failure, None, b""
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=SPACING)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
    first = b"" if matcher.get_error() else matcher.compute_bitmask()  # the dearest of most
    return matcher.get_error(), matcher, first


def _failure_on_the_way(compiled: Any, masks: int) -> str:
    """Return what fails in the first masks of two answers, of the lowest tokens and of the highest;
    "" for nothing."""
    for highest in (False, True):
        matcher = compiled.deep_copy()
        for _ in range(masks):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            if failure := str(matcher.get_error()):
                return failure
            matcher.consume_token((allowed if highest else allowed & -allowed).bit_length() - 1)
            if matcher.is_stopped():
                break
    return ""


def _answer(channel: socket.socket, compiled: Any, first: bytes, seconds: float) -> None:
    answers: dict[int, Any] = {}

    def reply(answer: int, kind: int, data: bytes = b"") -> None:
        channel.sendall(REPLY.pack(answer, kind, len(data)) + data)

    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer, token = COMMAND.unpack(received(channel, COMMAND.size))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if token == END:
            answers.pop(answer, None)
            continue
        if token == BEGIN:
            answers[answer] = compiled.deep_copy()
            reply(answer, MASK, first)
            continue
        matcher = answers[answer]
        matcher.consume_token(token)
        if failure := matcher.get_error():
            reply(answer, FAILED, failure.encode())
            continue
        if matcher.is_stopped():
            reply(answer, COMPLETE)
            continue
        reply(answer, GOES_ON)
        mask = matcher.compute_bitmask()  # while the model computes the next token's logits
        failure = matcher.get_error()
        reply(answer, FAILED, failure.encode()) if failure else reply(answer, MASK, mask)


if __name__ == "__main__":
    main(int(sys.argv[1]))
