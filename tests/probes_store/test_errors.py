from __future__ import annotations

import re

from probes_store import errors
from probes_store.errors import BundleError


def tree(kind: type[BundleError]) -> list[type[BundleError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = re.findall(r"^    ([|` -]*)(\w+) +(\d{3}) (\w+)", errors.__doc__ or "", re.M)
    parents: list[str] = []
    seen = []
    for indent, name, status, code in drawn:
        depth = len(indent) // 4
        parents[depth:] = [name]
        kind = getattr(errors, name)
        assert (kind.status, kind.code) == (int(status), code), name
        assert kind.__base__.__name__ == (parents[depth - 1] if depth else "Exception"), name
        seen.append(kind)
    ours = [kind for kind in tree(BundleError) if kind.__module__ == errors.__name__]
    assert sorted(kind.__name__ for kind in seen) == sorted(kind.__name__ for kind in ours)
    public = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)]
    assert set(public) == set(ours)


def test_each_class_has_a_code_and_a_docstring_of_its_own() -> None:
    kinds = [kind for kind in tree(BundleError) if kind.__module__ == errors.__name__]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all("code" in vars(kind) and "status" in vars(kind) and kind.__doc__ for kind in kinds)


def test_a_message_names_file_field_expected_found_and_cure() -> None:
    error = errors.BadValue("bad value", file="a/1/bundle.json", field="threshold", expected="a", found="b" * 1000)
    assert error.message.startswith("a/1/bundle.json field threshold: bad value; expected a, found bbb")
    assert "1000 characters" in error.message
    assert error.message.endswith(errors.BundleDamaged.default_cure or "never")
    assert len(error.message) < 400
