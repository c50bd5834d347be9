"""The packaging files as data, and the flags that they may name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from service.cli.main import make_app
from service.options import Sources, commands_of, options_of
from service.settings import env

ROOT = Path(__file__).resolve().parents[2]
Document = dict[str, Any]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is eight times as fast


class Step(NamedTuple):
    """One instruction of a Dockerfile: ``RUN`` and what follows it, continuation lines joined, in
    its stage."""

    stage: str
    verb: str
    text: str


def dockerfile() -> list[Step]:
    """Every instruction in order; ARG before the first FROM has stage ""."""
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if not line.lstrip().startswith("#")
    ]
    steps, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        verb, text = line.split(maxsplit=1)
        if verb == "FROM":
            stage = text.split()[-1]
        steps.append(Step(stage, verb, text.strip()))
    return steps


def environment(target: str = "runtime") -> dict[str, str]:
    """The environment that an image sets: ENV of its stage and of the stages it is built from."""
    steps = dockerfile()
    chain = [target]
    stages = {step.stage for step in steps}
    while chain[0] in stages:
        chain.insert(
            0,
            next(
                step.text.split()[0]
                for step in steps
                if (step.stage, step.verb) == (chain[0], "FROM")
            ),
        )
    pairs = " ".join(
        step.text for stage in chain for step in steps if (step.stage, step.verb) == (stage, "ENV")
    )
    return dict(pair.split("=", 1) for pair in pairs.split())


def compose() -> Document:
    """docker-compose.yml with ${NAME:-default} replaced by the default."""
    text = (ROOT / "docker-compose.yml").read_text()
    # a safe loader
    loaded: Document = yaml.load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text), _Loader)  # noqa: S506,
    return loaded


def load_all(text: str) -> list[Document]:
    """The YAML documents of a text."""
    return [document for document in yaml.load_all(text, _Loader) if document]


def documents(path: Path) -> list[Document]:
    """The YAML documents of one file."""
    return load_all(path.read_text())


def pods(found: list[Document]) -> list[Document]:
    """The pod templates of the Deployments: ``metadata`` and ``spec``."""
    return [document["spec"]["template"] for document in found if document["kind"] == "Deployment"]


def containers(pod: Document) -> list[Document]:
    """All of a pod's containers, sidecars too."""
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def variables(container: Document) -> dict[str, str]:
    """A container's plain environment variables; those from a Secret are left out."""
    return {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}


@cache
def flags() -> dict[str, dict[str, str]]:
    """Command -> flag -> environment variable, from the parser itself."""
    by_command: dict[str, dict[str, str]] = {"": {}}
    for command, arguments in commands_of(make_app(Sources())):
        by_command[" ".join(command)] = {
            name: env(argument.name)
            for argument in options_of(arguments)
            for name in argument.names
        }
    return by_command


def served(variables: Document) -> Document:
    """``serve``'s options as its own parser reads them from these variables alone."""
    sources = Sources(
        {name: value for name, value in variables.items() if name.startswith("HALLUTRACER_")}
    )
    make_app(sources).parse_args(["serve"], exit_on_error=False, print_error=False)
    return sources.values()
