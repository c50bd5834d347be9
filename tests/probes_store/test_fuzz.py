"""Mutations of a bundle's bytes: what a broken disk, a broken program or somebody with the store
may leave there.

Each must be refused with an error of the store, or give a bundle that is sound: the same content as
before, or, where the hashes were made right again, another digest and numbers within their ranges.
Anything else is a failure: another exception, a crash, a hang, memory without bound, or other
content under the old digest."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes_store import bundle as loading
from probes_store.bundle import Bundle, BundleDraft
from probes_store.errors import BundleError
from probes_store.store import SHIPPED, Store
from tests.kit.bundles import ANSWER, make_draft, write_bundle
from tests.kit.reseal import reseal, sha256

SHORT, LONG = 1_000, 60_000
MOST_MIB = 200  # that the peak may grow by; the largest file of the largest bundle has 60 KB
HANG_S = 60  # of one mutation; a load takes a millisecond
FILES = ("bundle.json", "probes.safetensors", "golden.safetensors", "answer.safetensors")
NOT_CONTENT = ("version", "created", "digest", "seal")
TEXTS = ("", "\0", "../../etc/passwd", "a" * 100_000, "\ud800", "\u202e", "NaN", "sha256:", "extra")
GONE = object()
ODD: tuple[Any, ...] = (
    *TEXTS,
    *("F64", "F16", "BF16", "I64", "U8", "BOOL", "X"),
    *(None, True, False, [], {}, [[]], [3, 1, 4], *[GONE] * 9),
    *(0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**400, 0.5, -0.5, 1e308, 5e-324, -0.0),
)  # what stands in the place of a value of JSON
LINES = (b"NaN", b"-Infinity", b"1e999", b'"\\ud800"', b"[" * 3000, b'{"a":' * 3000, b"\xff")
Files = dict[str, bytes]
Mutator = Callable[[random.Random, Files], None]
Change = Callable[[random.Random, bytes], bytes]


def flip(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 8, 64))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def splice(draw: random.Random, data: bytes) -> bytes:
    """A piece is left out, doubled, moved, zeroed, or replaced by random bytes; or the end is
    missing."""
    start = draw.randrange(len(data))
    at = draw.randrange(len(data))
    piece = data[start : start + draw.choice((1, 2, 4, 8, 16, 64, 512))]
    rest = data[start + len(piece) :]
    return draw.choice(
        (
            data[:start] + rest,
            data[:start] + piece * draw.choice((2, 3, 50)) + rest,
            data[:at] + piece + data[at:],
            data[:start] + bytes(len(piece)) + rest,
            data[:start] + draw.randbytes(len(piece)) + rest,
            data[:start],
            data + draw.randbytes(draw.choice((1, 8, 4096))),
        )
    )


def of_a_file(change: Change, *, sealed: bool = False) -> Mutator:
    """A change of one file with all hashes as they were, or of one tensor file with its hash, the
    digest and the seal made right again."""

    def mutate(draw: random.Random, files: Files) -> None:
        name = draw.choice(list(files)[int(sealed) :])
        files[name] = data = change(draw, files[name])
        if sealed:
            document = json.loads(files["bundle.json"])
            document["files"][name] = {"bytes": len(data), "sha256": sha256(data)}
            files["bundle.json"] = reseal(document)

    return mutate


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    return [pair for key in keys for pair in [(value, key), *places(value[key])]]


def disturb(draw: random.Random, document: dict[str, Any]) -> None:
    """Odd values, keys and types at some places of a JSON document, or those of another place."""
    spots = places(document)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        owner, key = draw.choice(spots)
        if (key not in owner) if isinstance(owner, dict) else (key >= len(owner)):
            continue
        old = owner[key]
        odd = draw.choice((*ODD, *[copy.deepcopy(draw.choice(spots)[0])] * 3))
        if isinstance(owner, dict) and draw.random() < 0.1:
            owner[draw.choice(TEXTS)] = old
        elif odd is GONE:
            del owner[key]
        elif draw.random() < 0.2:
            owner[key] = -old if type(old) in (int, float) else [old, old]
        else:
            owner[key] = odd


def header(draw: random.Random, data: bytes) -> bytes:
    """Another header of a tensor file: types, shapes, offsets, names, a name twice, its length."""
    size = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    spaces = 0
    shift = 0
    twice = b""
    name = draw.choice(sorted(document))
    other = draw.choice(sorted(document))
    match draw.randrange(5):
        case 0:
            spaces = draw.choice((0, 8, 1 << 17))
            shift = draw.choice((-size, -1, 1, 2**31, 2**63))
        case 1:
            twice = b"," + json.dumps({name: document[other]})[1:].encode()
        case 2:  # of the same size
            shape = document[name]["shape"]
            document[name]["shape"] = draw.choice((shape[::-1], [*shape, 1], [math.prod(shape)]))
        case _:
            disturb(draw, document)
    text = json.dumps(document, separators=(",", ":")).encode()
    text = text[:-1] + twice if twice else text
    text += b" " * (-len(text) % 8 + spaces)
    return max(0, len(text) + shift).to_bytes(8, "little") + text + body


def numbers(draw: random.Random, data: bytes) -> bytes:
    """Tensor values: NaN, infinities, zeros, huge and tiny ones, at one place or many."""
    size = int.from_bytes(data[:8], "little")
    body = bytearray(data[8 + size :])
    kinds = (
        ("<f4", (np.nan, np.inf, -np.inf, 0, -1, 3e38, 1e-45)),
        ("<f8", (np.nan, np.inf, 0, -1, 2, 1e308)),
        ("<i4", (-1, 0, 2**31 - 1, -(2**31))),
    )
    code, values = draw.choice(kinds)
    piece = np.array([draw.choice(values)], code).tobytes()
    for _ in range(draw.choice((1, 1, 4))):
        at = draw.randrange(0, max(1, len(body) - len(piece)), 4)
        body[at : at + len(piece)] = piece
    return data[: 8 + size] + bytes(body)


def manifest(draw: random.Random, files: Files) -> None:
    """The manifest's own values, keys and types, sealed again or not."""
    document = json.loads(files["bundle.json"])
    disturb(draw, document)
    try:
        files["bundle.json"] = (
            reseal(document) if draw.random() < 0.8 else json.dumps(document).encode()
        )
    except (
        UnicodeEncodeError,
        ValueError,
        AttributeError,
    ):  # half a surrogate, NaN: no program could have sealed that
        files["bundle.json"] = json.dumps(document).encode()


def json_text(draw: random.Random, files: Files) -> None:
    """The manifest as text: a value that JSON readers disagree about, a key twice, other white
    space."""
    lines = files["bundle.json"].split(b"\n")
    at = draw.randrange(1, len(lines) - 2)
    line, following = lines[at : at + 2]
    odd = line.partition(b":")[0] + b": " + draw.choice(LINES) + b","
    ways = ([odd, following], [line] * 2, [b" " + line, following], [following, line])
    lines[at : at + 2] = draw.choice(ways)
    files["bundle.json"] = b"\n".join(lines)


MUTATORS: dict[str, Mutator] = {
    "bits": of_a_file(flip),
    "pieces": of_a_file(splice),
    "bits, resealed": of_a_file(flip, sealed=True),
    "pieces, resealed": of_a_file(splice, sealed=True),
    "headers, resealed": of_a_file(header, sealed=True),
    "numbers, resealed": of_a_file(numbers, sealed=True),
    "manifest": manifest,
    "manifest's text": json_text,
}


def content(files: Files) -> str:
    """What the digest is of, as text: 0.0 and -0.0 are equal numbers and other bytes."""
    document = json.loads(files["bundle.json"])
    return json.dumps(
        {key: value for key, value in document.items() if key not in NOT_CONTENT}, sort_keys=True
    )


def check_sound(found: Bundle, origin: Bundle, files: Files, original: Files) -> None:
    """Other content has another digest, and two readers see the same.  Raises AssertionError.

    That what is accepted is in its ranges, test_manifest and test_bundle check field by field."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in pairs}) == len(pairs), "an entry twice"
        return dict(pairs)

    same_content = all(files[name] == original[name] for name in files if name != "bundle.json")
    same_content = same_content and content(files) == content(original)
    assert (found.manifest.digest == origin.manifest.digest) == same_content, (
        "other content under the same digest"
    )
    assert files == original or found.manifest.seal != origin.manifest.seal, (
        "other bytes under the same seal"
    )
    values = [owner[key] for owner, key in places(json.loads(files["bundle.json"]))]
    assert all(abs(value) <= 2**53 for value in values if type(value) is int), (
        "a number that readers disagree about"
    )
    for name in list(files)[
        1:
    ]:  # two readers see the same: no entry twice, nothing hidden behind the header
        text = files[name][8 : 8 + int.from_bytes(files[name][:8], "little")]
        assert len(text) - len(text.rstrip(b" ")) < 8, "something may hide in the padding"
        json.loads(text, object_pairs_hook=unique)


def fuzz(origin: Bundle, count: int, seed: int, kinds: Counter[str], refused: Counter[str]) -> None:
    """``count`` mutations of one bundle in its folder; counts those that were refused, by mutator
    and by error.

    ``kinds`` also counts (with "=") those that came out as they were and (with "+") those that were
    accepted."""
    draw = random.Random(seed)
    original = {
        name: (origin.path / name).read_bytes() for name in FILES if (origin.path / name).exists()
    }
    there = dict(original)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)  # a hang ends as by Ctrl-C
    for number in range(count):
        kind = draw.choice(list(MUTATORS))
        files = dict(original)
        MUTATORS[kind](draw, files)
        kinds[f"={kind}"] += files == original
        for name in files:
            if files[name] is not there[name]:
                (origin.path / name).write_bytes(files[name])
        there = files
        try:
            signal.setitimer(signal.ITIMER_REAL, HANG_S)
            found = loading.load_bundle(origin.path)
            check_sound(found, origin, files, original)
            kinds[f"+{kind}"] += 1
        except BundleError as error:
            kinds[kind] += 1
            refused[type(error).__name__] += bool(str(error))
        except (Exception, KeyboardInterrupt) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            place = f"{origin.reference}, mutation {number} of seed {seed} ({kind})"
            raise AssertionError(f"{place}: {error!r}") from error
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def origins(folder: Path) -> Iterator[Bundle]:
    """A tiny bundle of each layout, and those that come with the package, all without what is large
    and no tensor."""
    shipped = [Store(SHIPPED).load(name) for name in ("demo", "smollm2")]
    for place, draft in enumerate(
        [
            make_draft(),
            make_draft(
                1,
                signals=("depth_mean", "entropy", "log_max_prob"),
                logit_scale="standardized",
                answer=ANSWER,
            ),
            make_draft(2, site="residual_stream", chat_template=None, prompt_format="text"),
            *(
                BundleDraft(one.manifest, one.probes, one.golden, {}, "# card\n", {}, one.answer)
                for one in shipped
            ),
        ]
    ):
        draft = dataclasses.replace(draft, evaluation={}, plots={})
        yield write_bundle(draft, folder / str(place) / draft.manifest.name / "1")


@pytest.mark.parametrize(
    ("count", "seed"), [(SHORT, 1), pytest.param(LONG, 1000, marks=pytest.mark.long)]
)
def test_mutations_are_refused_or_sound(count: int, seed: int) -> None:
    kinds = Counter[str]()
    refused = Counter[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = Path("/dev/shm")  # a hundred thousand writes need no disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for number, bundle in enumerate(origins(Path(folder))):
            fuzz(bundle, count // 5, seed + number, kinds, refused)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MOST_MIB
    assert sum(number for kind, number in kinds.items() if kind[0] != "=") == count
    for kind in (
        "bits",
        "pieces",
        "manifest's text",
    ):  # without new hashes nothing passes but what is as it was
        assert kinds[f"+{kind}"] <= kinds[f"={kind}"]
    assert all(kinds[kind] > count // 20 for kind in MUTATORS), kinds
    assert len(refused) >= 7  # it comes past the hashes, to the checks behind them
    assert kinds["+numbers, resealed"] > kinds["=numbers, resealed"]


@pytest.mark.parametrize("found", ["a crash", "the old bundle", "a hang"])
def test_the_fuzzer_would_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    origin = write_bundle(make_draft(answer=ANSWER), tmp_path / "tiny" / "1")

    def loads(_: Path) -> Bundle:
        while found == "a hang":
            pass
        return origin if found == "the old bundle" else 1 / 0  # type: ignore[return-value]

    monkeypatch.setattr(loading, "load_bundle", loads)
    monkeypatch.setitem(globals(), "HANG_S", 0.05)
    with pytest.raises(AssertionError, match=r"mutation \d+ of seed 3"):
        fuzz(origin, 50, 3, Counter(), Counter())
