"""``hallutracer keys`` and ``hallutracer audit``, and what they do to a service that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from service.access.callers import digest_of
from service.access.keys import read_keys
from service.audit.auditor import SERVICE, change
from service.audit.file import AuditFile, head_path, verify
from tests.command_line import hallutracer, one_line_says, run
from tests.kit.key_files import add_key, revoke_key
from tests.running import until
from tests.serve_process import ServeProcess


def test_the_lines_of_a_key_hold_no_secret_and_can_be_pasted(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"

    def make(options: str) -> str:
        done = hallutracer("keys", "make", *options.split())
        with path.open("a") as file:
            file.write(done.stdout)
        return done.stderr.splitlines()[-1]

    secret = make("trial --expires 30d")
    make("ops --scope admin --scope observe --expires never --may threshold")
    assert re.fullmatch(r"ht-[\w-]{43}", secret)
    assert secret not in path.read_text()
    key, _ = read_keys(path)
    assert key.digest == digest_of(secret)
    assert key.expires is not None
    assert timedelta(days=29) < key.expires - datetime.now(UTC) <= timedelta(days=30)
    revoke_key(path, "trial")
    listed = hallutracer("keys", "list", "--keys", str(path)).stdout
    assert re.search(r"trial\s+score\s+revoked", listed)
    assert re.search(r"ops\s+admin, observe\s+in force\s+never\s+threshold", listed)
    assert key.digest not in listed
    rows = json.loads(hallutracer("keys", "list", "--keys", str(path), "--json").stdout)
    assert [row["state"] for row in rows] == ["revoked", "in force"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("make X", "lower-case"),
        ("make x --expires 2020-01-01", "not in the future"),
        ("make x --expires 99d9", "90d, 2027-02-21 or never"),
        ("make x --scope root", "score"),
        ("list", "--keys"),
    ],
)
def test_a_wrong_command_prints_no_key(command: str, message: str) -> None:
    one_line_says(f"keys {command}", 2, message)


def test_verify_says_whether_a_log_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path)
    file.append(
        [change(SERVICE, "keys.reload", "done", {"name": name}) for name in ("a", "b", "c")]
    )
    file.close()
    assert run("audit", "verify", str(path)) == 0
    printed = capsys.readouterr().out
    assert "3 lines: 3 keys.reload" in printed
    [head] = re.findall(r"sha256:[0-9a-f]{64}", printed)
    assert run("audit", "verify", str(path), "--seen", head) == 0
    text = path.read_text()
    head_path(path).unlink()
    assert run("audit", "verify", str(path)) == 0
    assert "whether lines are gone from its end is not known" in capsys.readouterr().out
    path.write_text(text.replace('"b"', '"x"'))
    assert run("audit", "verify", str(path), "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["whole"] is False
    assert "line 3 does not follow" in printed.err
    assert run("audit", "verify") == 2


def test_a_running_service_follows_its_keys_and_a_kill_loses_no_decision(tmp_path: Path) -> None:
    """Rotation and SIGHUP, too: a real process, and nothing that was told is missing after
    SIGKILL."""
    path, log, old = tmp_path / "keys.toml", tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    one = add_key(path, "one", {"scopes": ["score"]})
    options = (f"--keys={path}", f"--audit-log={log}", "--threads=1")
    with ServeProcess(*options, HALLUTRACER_STORE=str(tmp_path)) as service:

        def ask(secret: str, **headers: str) -> httpx.Response:
            headers |= {"authorization": f"Bearer {secret}"}
            return httpx.post(
                f"{service.url}/score", json={"prompt": "Why?"}, headers=headers, timeout=60
            )

        [command] = [line for line in service.said.splitlines() if "curl" in line]
        answer = subprocess.check_output(["bash", "-c", command], env=os.environ | {"KEY": one})
        assert json.loads(answer)["data"][0]["risk"] > 0
        two = add_key(path, "two", {"scopes": ["score"]})
        until(lambda: ask(two).status_code == 200)
        log.rename(old)
        os.kill(service.process.pid, signal.SIGHUP)
        until(
            lambda: (
                log.exists() and "bundles.reload" in log.read_text() and '"done"' in log.read_text()
            )
        )
        [begun, done] = [json.loads(text) for text in log.read_text().splitlines()]
        assert (begun["by"], begun["outcome"], done["outcome"]) == ("signal", "begun", "done")
        assert done["what"]["before"] == done["what"]["after"] != {}
        good = path.read_text()
        path.write_text("[")
        os.kill(
            service.process.pid, signal.SIGHUP
        )  # what is wrong with the keys keeps no bundle from being swapped
        until(lambda: log.read_text().count('"done"') == 2)
        until(lambda: "the keys in force stay" in service.log())
        path.write_text(good)
        told, lock = list[str](), threading.Lock()

        def keep_asking(name: int) -> None:
            for number in range(1000):
                try:
                    answer = ask(one, **{"x-request-id": f"r{name}-{number}"})
                except httpx.TransportError:
                    return
                with lock:
                    told.append(answer.json()["id"].removeprefix("risk-"))

        with ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(keep_asking, name) for name in range(4)]
            until(lambda: len(told) > 40)
            os.kill(service.process.pid, signal.SIGKILL)
            for one_of in asking:
                one_of.result()
    AuditFile(log).append(
        [change(SERVICE, "service.start", "done", {})]
    )  # as the next process begins
    result = verify([old, log])
    assert result.problems == []
    kept = {json.loads(text).get("request_id") for text in log.read_text().splitlines()}
    assert set(told) <= kept
    assert "keys.reload" in old.read_text()
