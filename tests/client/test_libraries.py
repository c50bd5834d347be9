"""Client libraries of others against a real service: their quick starts, and our adapters for
them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.engines.places import PACKAGED
from service.library.engine import SHIPPED, SMOLLM2
from tests.kit.pages import blocks
from tests.serve_process import CLIENT, MAY_CHOOSE, PATHS, ROOT, inherited, serve

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
QUICKSTARTS = ROOT / "clients" / "quickstarts"
SCRIPTS = sorted(path.name for path in QUICKSTARTS.glob("*.py"))
PAGE = blocks(ROOT / "docs" / "apps.md")
KNOWN, UNKNOWN = "What is the capital of China?", "Which city is the capital of Dominica?"
ANSWER = "It is Beijing."
# What a withheld answer looks like in each, as the service writes it by default, and with
# --message-in-content.
REFUSED = "refused: I am not sure. (content_filter)"
IN_ANTHROPICS = "refused: I am not sure. (refusal)"
PLAIN = {
    "langchain_messages.py": IN_ANTHROPICS,
    "haystack_chat.py": "refused: no text (content_filter)",
    "llamaindex_openai_like.py": f"{REFUSED}, shown as: no text",
}
AS_TEXT = {
    "llamaindex_openai_like.py": f"{REFUSED}, shown as: I am not sure.",
    "langchain_messages.py": IN_ANTHROPICS,
}


def needed() -> Path:
    """Its interpreter.  Skips the test without it; fails under HALLUTRACER_REQUIRE_CLIENTS=1, as
    ``make test`` sets."""
    if not (PYTHON.parent.parent / ".installed").exists():
        reason = "the client libraries are not installed: make clients"
        (pytest.fail if os.environ.get("HALLUTRACER_REQUIRE_CLIENTS") == "1" else pytest.skip)(
            reason
        )
    return PYTHON


def in_their_environment(
    *arguments: str | Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Its Python, with our client on the path and without what these libraries look up on the
    internet."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HAYSTACK_TELEMETRY_ENABLED": "False"}
    environment = (
        inherited() | quiet | {"LANGSMITH_TRACING": "false", "PYTHONPATH": PATHS} | variables
    )
    return subprocess.run(
        [PYTHON, *arguments], capture_output=True, text=True, timeout=1800, env=environment
    )


def page_options() -> list[str]:
    """The options with which apps.md starts the service."""
    program, command, *options = shlex.split(
        next(block.text for block in PAGE if "hallutracer serve" in block.text)
    )
    assert (program, command) == ("hallutracer", "serve")
    return options


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """``plain``: without --message-in-content.  ``page``: with the options of apps.md.

    Both take any model name, as one that has a quick start's requests needs."""
    needed()
    store = str(tmp_path_factory.mktemp("store"))
    with (
        serve("--served-model-name", "*", **MAY_CHOOSE) as plain,
        serve(*page_options(), HALLUTRACER_STORE=store) as page,
    ):
        yield {"plain": plain.url, "page": page.url}


RUN, FRAMEWORKS = ROOT / "tests/client/run_scripts.py", ROOT / "tests/client/frameworks"


@pytest.fixture(scope="module")
def found(urls: dict[str, str]) -> dict[str, Any]:
    """Service -> {script: [what it prints, its error]}; "tests": what the adapters' print, exit
    status."""
    done = in_their_environment(RUN, QUICKSTARTS, FRAMEWORKS, *urls.values())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return {name: result[url] for name, url in urls.items()} | {"tests": result["tests"]}


@pytest.mark.parametrize("service", ["plain", "page"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_quick_start_runs_and_shows_a_refusal(
    found: dict[str, Any], script: str, service: str
) -> None:
    out, error = found[service][script]
    assert not error, error
    lines = out.splitlines()
    (known,) = [line for line in lines if line.startswith(KNOWN)]
    assert known.startswith(f"{KNOWN} answered: ")
    # LangChain takes the temperature out of requests to a model of the quick start's name: its
    # answers vary.
    assert known.endswith(ANSWER) or script == "langchain_chat.py"
    (unknown,) = [line for line in lines if line.startswith(UNKNOWN)]
    assert unknown == f"{UNKNOWN} {(PLAIN if service == 'plain' else AS_TEXT).get(script, REFUSED)}"
    if script == "langchain_chat.py":
        said = "no text" if service == "plain" else "I am not sure."
        assert lines[-1] == f"streamed: {said} (content_filter)"
    elif script.startswith("langchain"):
        assert lines[-1] == f"streamed: {(PLAIN | AS_TEXT).get(script, REFUSED)}"
    told = [line for line in lines if line.startswith("risk: ")]
    assert not told or told == ["risk: 0.90"]


@pytest.mark.skipif(
    not PACKAGED["smollm2"].is_installed, reason=f"needs {PACKAGED['smollm2'].install}"
)
def test_a_quick_start_prints_what_the_page_says(tmp_path: Path) -> None:
    """On its reader's model, under the policy that nobody has set."""
    shown = [block.text.splitlines() for block in PAGE if block.language == "console"]
    assert shown
    unset = {"HALLUTRACER_MODEL": "", "HALLUTRACER_POLICY": ""}
    # The bundle that answers by default; the golden prompts of the other take seconds to replay.
    bundle = {"HALLUTRACER_BUNDLE": SHIPPED[SMOLLM2][0]}
    # The script's first question names no length, and a whole answer to it would take minutes; a
    # busy machine may take longer for these than the default deadline.
    limits = {"HALLUTRACER_MAX_COMPLETION_TOKENS": "24", "HALLUTRACER_DEADLINE_S": "600"}
    with serve(
        *page_options(), HALLUTRACER_STORE=str(tmp_path), **unset, **bundle, **limits
    ) as page:
        for command, *printed in shown:
            named = re.fullmatch(
                r"\$ python (clients/quickstarts/\w+\.py) \| tail -n (\d+)", command
            )
            assert named, command
            done = subprocess.run(
                [sys.executable, ROOT / named[1]],
                env=inherited() | {"HALLUTRACER_URL": page.url},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.splitlines()[-int(named[2]) :] == printed


def test_the_adapters(found: dict[str, Any]) -> None:
    out, status = found["tests"]
    assert status == 0, out[-8000:]
    for framework in ("langchain", "llamaindex", "haystack"):
        assert f"hallutracer-client[{framework}]" in (CLIENT / "README.md").read_text()


def test_the_newest_openai_client_too(urls: dict[str, str]) -> None:
    """The frameworks hold OpenAI's client back by a major version; this environment has the
    newest."""
    done = subprocess.run(
        [sys.executable, RUN, QUICKSTARTS, "", urls["plain"]], env=inherited(), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    for script in ("openai_async.py", "openai_streaming.py", "openai_sync.py"):
        out, error = json.loads(done.stdout)[urls["plain"]][script]
        assert not error, error
        assert f"{UNKNOWN} {REFUSED}" in out
        assert f"{KNOWN} answered:  {ANSWER}" in out


def test_a_quick_start_names_what_it_changed() -> None:
    for script in SCRIPTS:
        assert "Changed: " in (QUICKSTARTS / script).read_text().splitlines()[0], script


def test_an_adapter_without_its_library_says_which_extra() -> None:
    """This environment has none of the three."""
    for framework in ("langchain", "llamaindex", "haystack"):
        with pytest.raises(
            ImportError, match=re.escape(f"pip install 'hallutracer-client[{framework}]'")
        ):
            importlib.import_module(f"hallutracer_client.{framework}")
