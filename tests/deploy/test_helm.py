"""The Helm chart, rendered by a real helm: schemas, pods, rules and refusals."""

from __future__ import annotations

import functools
import json
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service import __version__
from tests.deploy.test_packaging import KUBERNETES, MANIFESTS, schema_errors
from tests.kit import packaging as p
from tests.kit.prometheus import OURS, ROOT, binary, promtool

CHART = ROOT / "deploy" / "helm" / "hallutracer"
GPU, VLLM = CHART / "values-gpu.yaml", CHART / "values-vllm.yaml"
ROLLOUT = CHART / "values-rollout.yaml"
OVERLAYS = {"base": (), "gpu": (GPU,), "vllm": (GPU, VLLM)}
MONITORED = (
    "podMonitor.enabled=true",
    "prometheusRule.enabled=true",
    "autoscaling.queueWait.enabled=true",
)


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [binary("helm"), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def template(
    *files: Path, values: tuple[str, ...] = (), release: str = "hallutracer", chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    chosen = [word for file in files for word in ("--values", str(file))]
    for value in values:  # --set reads 0.5 as a text
        chosen += ["--set-json" if re.search(r"=\d*\.\d+$", value) else "--set", value]
    return helm("template", release, chart, "--namespace", "hallutracer", *chosen)


@functools.cache
def rendered(*files: Path, **options: Any) -> tuple[p.Document, ...]:
    done = template(*files, **options)
    assert done.returncode == 0, done.stderr
    return tuple(p.load_all(done.stdout))


def document_of(documents: tuple[p.Document, ...], kind: str) -> p.Document:
    [document] = [document for document in documents if document["kind"] == kind]
    return document


def container(documents: tuple[p.Document, ...]) -> p.Document:
    [only] = p.containers(document_of(documents, "Deployment")["spec"]["template"])
    return only


HARDENED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
PODS = [*OVERLAYS, *(path.stem for path in MANIFESTS)]


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_hardened_drains_and_is_found(name: str) -> None:
    files = {path.stem: path for path in MANIFESTS}
    documents = list(rendered(*OVERLAYS[name])) if name in OVERLAYS else p.documents(files[name])
    bare = [item for item in documents if item["kind"] == "Pod"]
    alone = [pod for pod in bare if "annotations" not in pod["metadata"]]  # not helm test's
    for pod in [*p.pods(documents), *alone]:
        spec = pod["spec"]
        context = spec["securityContext"]
        assert HARDENED.items() <= context.items()
        user = next(step.text for step in p.dockerfile() if step.verb == "USER")
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
        assert spec["enableServiceLinks"] is False  # they would overwrite HALLUTRACER_PORT
        volumes = {volume["name"] for volume in spec["volumes"]}
        for item in p.containers(pod):
            variables = p.variables(item)
            assert item["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"requests", "limits"} <= set(item["resources"])
            paths = {mount["name"]: mount["mountPath"] for mount in item.get("volumeMounts", [])}
            assert set(paths) <= volumes
            files = [value for value in variables.values() if value.startswith("/")]
            assert {str(Path(file).parent) for file in files} <= set(paths.values())
            sleep = (
                item["lifecycle"]["preStop"]["exec"]["command"][-1] if "lifecycle" in item else 0
            )
            stopping = float(sleep) + float(variables.get("HALLUTRACER_DRAIN_S", 0))
            assert stopping < spec["terminationGracePeriodSeconds"]
            if item.get("args") == ["serve"]:
                for probe, route in (
                    ("startup", "ready"),
                    ("readiness", "ready"),
                    ("liveness", "live"),
                ):
                    assert f"/health/{route}" in json.dumps(item[f"{probe}Probe"])
    labels = [pod["metadata"]["labels"] for pod in p.pods(documents)]
    for item in documents:
        selector = item.get("spec", {}).get("podSelector", item.get("spec", {}).get("selector", {}))
        wanted = selector.get("matchLabels", selector)
        assert not wanted or any(wanted.items() <= label.items() for label in labels), item["kind"]
    assert {item["kind"] for item in documents} >= ({"NetworkPolicy"} if labels else set())


def claims(documents: tuple[p.Document, ...]) -> set[str]:
    """The names of the volumes that are asked for."""
    return {name for kind, name in kinds_and_names(documents) if kind == "PersistentVolumeClaim"}


def test_the_overlays_ask_for_their_engine_their_gpus_and_their_claims() -> None:
    for name, engine, gpus in (
        ("base", "transformers", None),
        ("gpu", "transformers", 1),
        ("vllm", "vllm", 2),
    ):
        documents = rendered(*OVERLAYS[name])
        own = container(documents)
        variables = p.variables(own)
        tag = __version__ + {"base": "", "gpu": "-cuda", "vllm": "-vllm"}[name]
        assert own["image"] == f"hallutracer:{tag}"
        assert variables.get("HALLUTRACER_ENGINE", "transformers") == engine
        assert own["resources"]["limits"].get("nvidia.com/gpu") == gpus
        parallel = int(variables.get("HALLUTRACER_TENSOR_PARALLEL_SIZE", 1))
        assert parallel == (2 if name == "vllm" else 1)
        mounts = {mount["mountPath"] for mount in own["volumeMounts"]}
        assert ("/dev/shm" in mounts) == (name == "vllm")
        volumes = {"hallutracer-probes", "hallutracer-huggingface"} if gpus else set()
        assert claims(documents) == volumes
        assert ("HorizontalPodAutoscaler" in {item["kind"] for item in documents}) == (gpus is None)
    [helper] = p.documents(MANIFESTS[1])
    claim = helper["spec"]["volumes"][0]["persistentVolumeClaim"]
    assert claim == {"claimName": "hallutracer-probes"}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("folder", OVERLAYS)
def test_what_it_renders_fits_kubernetes_schemas(folder: str, version: str) -> None:
    documents = rendered(*OVERLAYS[folder])
    assert len(documents) >= 5
    scaled = rendered(values=MONITORED[2:]) if folder == "base" else ()
    assert schema_errors([*documents, *scaled], version) == []


def test_the_schema_is_up_to_date_with_the_options_of_serve() -> None:
    script = runpy.run_path(str(CHART.parent / "values_schema.py"))
    assert script["text"]() == (CHART / "values.schema.json").read_text(), (
        "run: python deploy/helm/values_schema.py"
    )
    assert {"max_queue", "policy", "bundle", "engine"} <= set(script["options"]())
    assert not {"api_key", "port", "feedback_db"} & set(script["options"]())


# A value of the chart, and words of what it is refused with.
REFUSED = """
options.max_qeue=3 | 'max_qeue' not allowed
options.port=9 | 'port' not allowed
options.api_key=abcdefghijklmnopqrst | 'api_key' not allowed
options.threshold=2 | want 1
options.store=/probes | does not match pattern
options.deadline_s=0 | want 0
options.drain_s=null | drain_s
options.shadow=one | want array
options.bundle={a b} | does not match pattern
replica=2 | 'replica' not allowed
gpus=two | want integer
image.digest=latest | does not match pattern
prometheusRule.grafanaUrl=https://g.example/ | does not match pattern
resources.limits= | want object
storage.tmp=lots | does not match pattern
apiKeys.secret= | allow_anonymous
podMonitor.enabled=true,options.protect_metrics=true | podMonitor.keySecret
autoscaling.cpuUtilization=0 | needs a signal
networkPolicy.clients=null | clients
user.runAsUser=0 | runAsUser
extraEnv[0].name=HALLUTRACER_HOST,extraEnv[0].value=x | extraEnv
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_a_wrong_value_is_refused_before_it_reaches_a_cluster(row: str) -> None:
    value, words = row.split(" | ")
    done = template(values=(value,))
    assert done.returncode != 0
    assert words in done.stderr


def served(documents: tuple[p.Document, ...]) -> p.Document:
    """The options that ``serve`` reads from its variables, but for files of the cluster."""
    variables = p.variables(container(documents))
    files = [name for name, value in variables.items() if value.startswith("/etc/")]
    return p.served({name: variables[name] for name in variables.keys() - files})


def test_options_become_variables_that_serve_reads_alike(tmp_path: Path) -> None:
    # helm reads a file's numbers as floats, which it would write with an exponent.
    file = tmp_path / "mine.yaml"
    file.write_text(
        "options: {max_body_bytes: 8388608, deadline_s: 12.5, playground: false, threshold: 0, "
        "bundle: [demo, demo-fused], policy: support}\n"
    )
    documents = rendered(file)
    assert p.variables(container(documents))["HALLUTRACER_MAX_BODY_BYTES"] == "8388608"
    read = served(documents)
    expected = {
        "max_body_bytes": 8388608,
        "deadline_s": 12.5,
        "playground": False,
        "bundle": ("demo", "demo-fused"),
        "policy": "support",
        "threshold": 0.0,
        "drain_s": 30.0,
        "threads": None,
    }
    assert {name: read[name] for name in expected} == expected


def test_requests_may_be_addressed_to_the_service_and_to_the_names_that_are_given() -> None:
    def names(*values: str, release: str = "hallutracer") -> list[str]:
        return p.variables(container(rendered(values=values, release=release)))[
            "HALLUTRACER_ALLOWED_HOST"
        ].split()

    own = ["hallutracer", "hallutracer.hallutracer", "hallutracer.hallutracer.svc"]
    assert names() == ["localhost", *own, f"{own[-1]}.cluster.local"]
    assert names("options.allowed_host={guard.example,b.example}") == [
        *names(),
        "guard.example",
        "b.example",
    ]
    documents = rendered(release="blue")
    assert (
        sum(entry["name"] == "HALLUTRACER_ALLOWED_HOST" for entry in container(documents)["env"])
        == 1
    )
    [ask] = document_of(documents, "Pod")["spec"]["containers"]  # helm test
    for name in (
        "blue-hallutracer.hallutracer.svc",
        document_of(documents, "Service")["metadata"]["name"],
        ask["command"][-1],
    ):
        assert name in names(release="blue")


GROUPS = {"runAsGroup": 10001, "fsGroup": 10001}
SECURITY = "Deployment.spec.template.spec.securityContext"
ANONYMOUS = ("options.drain_s=119.5", "apiKeys.secret=", "options.allow_anonymous=true")
IMAGE = f"r.example/hallutracer@sha256:{'0123456789abcdef' * 4}"
BY_DIGEST = (
    "image.repository=r.example/hallutracer",
    f"image.digest={IMAGE.partition('@')[2]}",
    "image.tag=0.1.0-mine",
)
PROTECTED = (*MONITORED, "options.protect_metrics=true", "podMonitor.keySecret=scrape")
# Values of the chart, a place in what it renders, and what stands there.
RENDERED: list[tuple[tuple[str, ...], str, Any]] = [
    (("options.bundle=my-probe",), "env.HALLUTRACER_BUNDLE", "my-probe"),
    (("options.bundle={my-probe,other:2}",), "env.HALLUTRACER_BUNDLE", "my-probe other:2"),
    (ANONYMOUS, "Deployment.spec.template.spec.terminationGracePeriodSeconds", 140),
    (ANONYMOUS, "env.HALLUTRACER_API_KEY_FILE", None),
    (ANONYMOUS, "env.HALLUTRACER_ALLOW_ANONYMOUS", "true"),
    (("user=null",), SECURITY, HARDENED),
    (("user=null",), "container.securityContext.readOnlyRootFilesystem", True),
    *(
        ((f"user.runAsUser={user}",), SECURITY, HARDENED | GROUPS | context)
        for user, context in (("null", {}), (1000660000, {"runAsUser": 1000660000}))
    ),
    ((), "Pod.spec.containers.0.image", f"hallutracer:{__version__}"),
    (BY_DIGEST, "container.image", IMAGE),
    (BY_DIGEST, "Pod.spec.containers.0.image", IMAGE),
    (
        (*MONITORED, "autoscaling.queueWait.seconds=0.1"),
        "HorizontalPodAutoscaler.spec.metrics.1.pods.target",
        {"type": "AverageValue", "averageValue": "100m"},
    ),
    (
        PROTECTED,
        "PodMonitor.spec.podMetricsEndpoints.0.authorization",
        {"credentials": {"name": "scrape", "key": "key"}},
    ),
]
PATHS = [path for _, path, _ in RENDERED]


@pytest.mark.parametrize(("values", "path", "expected"), RENDERED, ids=PATHS)
def test_a_value_is_rendered(values: tuple[str, ...], path: str, expected: Any) -> None:
    documents = rendered(values=values)
    kind, *keys = path.split(".")
    if kind == "env":
        assert p.variables(container(documents)).get(keys[0]) == expected
        return
    value: Any = container(documents) if kind == "container" else document_of(documents, kind)
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    assert value == expected


def test_without_keys_no_secret_is_mounted() -> None:
    assert "api-keys" not in json.dumps(document_of(rendered(values=ANONYMOUS), "Deployment"))


def test_the_values_that_the_page_shows_fetch_the_first_bundle_from_a_url(tmp_path: Path) -> None:
    page = (ROOT / "deploy/README.md").read_text().split("### Your own model, on a GPU")[1]
    shown, *_ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (mine := tmp_path / "mine.yaml").write_text(shown)
    documents = rendered(GPU, mine)
    variables = p.variables(container(documents))
    assert variables["HALLUTRACER_STORE"] == "hf://OWNER/my-probe"
    assert variables["HALLUTRACER_BUNDLE"] == "my-probe"
    mounts = {mount["mountPath"] for mount in container(documents)["volumeMounts"]}
    # The root file system is read-only.
    assert str(Path(variables["HALLUTRACER_STORE_CACHE"]).parent) in mounts
    assert claims(documents) == {"hallutracer-huggingface"}
    assert schema_errors(list(documents), KUBERNETES[-1]) == []


def test_a_rollout_is_what_serve_is_told_and_bundles_outlive_the_pods() -> None:
    documents = rendered(ROLLOUT)
    read = served(documents)
    expected = {
        "bundle": ("my-probe",),
        "shadow": ("my-probe@shadow",),
        "canary": "my-probe@canary",
        "canary_share": 0.05,
        "watch_s": 10.0,
        "replay_s": 600.0,
    }
    assert {name: read[name] for name in expected} == expected
    claim = document_of(documents, "PersistentVolumeClaim")["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert schema_errors(list(documents), KUBERNETES[-1]) == []


def test_a_rollout_that_cannot_go_on_is_told_at_the_installation() -> None:
    for value, words, unsaid in (
        ("replicas=2", "helm test hallutracer", ("options.watch_s", "storage.probes.claim")),
        ("options.watch_s=0", "Set options.watch_s", ()),
        ("storage.probes.claim=false", "without storage.probes.claim", ()),
    ):
        done = helm(
            "install", "hallutracer", CHART, "--dry-run=client", "--values", ROLLOUT, "--set", value
        )
        assert done.returncode == 0, done.stderr
        notes = done.stdout.partition("NOTES:")[2]
        assert (words in notes, [word for word in unsaid if word in notes]) == (True, [])


def kinds_and_names(documents: tuple[p.Document, ...]) -> set[tuple[str, str]]:
    return {(document["kind"], document["metadata"]["name"]) for document in documents}


def test_two_releases_in_one_namespace_do_not_meet() -> None:
    first, second = rendered(), rendered(release="blue")
    assert not kinds_and_names(first) & kinds_and_names(second)
    for kind in ("Service", "Deployment", "PodDisruptionBudget", "NetworkPolicy"):
        spec = document_of(second, kind)["spec"]
        selector = spec.get("podSelector", spec.get("selector", {}))
        assert selector.get("matchLabels", selector)["app.kubernetes.io/instance"] == "blue"


def test_the_operators_rules_are_the_rules_and_lead_to_the_page_that_is_named() -> None:
    files = sorted((OURS / "rules").glob("*.yml"))
    for path in files:
        assert (CHART / "rules" / path.name).read_text() == path.read_text(), (
            f"copy {path} into {CHART / 'rules'}"
        )
    groups = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    # promtool takes these rules elsewhere.
    assert document_of(rendered(values=MONITORED), "PrometheusRule")["spec"] == {"groups": groups}
    url = "https://wiki.example/risk.html"
    grafana = "https://g.example/grafana"
    named = f"prometheusRule.runbookUrl={url}", f"prometheusRule.grafanaUrl={grafana}"
    spec = document_of(rendered(values=(*MONITORED, *named)), "PrometheusRule")["spec"]
    for rule in (rule for group in spec["groups"] for rule in group["rules"] if "alert" in rule):
        notes = rule["annotations"]
        assert notes["runbook_url"] == f"{url}#{rule['alert'].lower()}"
        assert notes["dashboard_url"].startswith(f"{grafana}/d/hallutracer-")


def test_the_operators_scrape_is_under_the_alerts_job() -> None:
    documents = rendered(values=MONITORED)
    monitor = document_of(documents, "PodMonitor")["spec"]
    labels = document_of(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "hallutracer"  # what the rules' job="..." looks for
    [endpoint] = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container(documents)["ports"]}


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_serves() -> None:
    metrics = document_of(rendered(values=MONITORED), "HorizontalPodAutoscaler")
    by_wait = metrics["spec"]["metrics"][1]["pods"]
    [rule] = p.documents(ROOT / "deploy/helm/prometheus-adapter.yml")[0]["rules"]["custom"]
    assert by_wait["metric"]["name"] == rule["name"]["as"]


WAITS = {"a": ("0+15x10", "0+30x10"), "b": ("3x10", "9x10"), "c": ("0+99x10", "0+9x10")}


def check_query(
    folder: Path,
    query: str,
    values: dict[str, float],
    namespace: str = "hallutracer",
) -> None:
    """Let promtool evaluate it over the queue's waits of three pods; c is of ``namespace``."""
    series = [
        {
            "series": f"hallutracer_queue_seconds_{kind}"
            f'{{namespace="{namespace if pod == "c" else "hallutracer"}",pod="{pod}"}}',
            "values": steps,
        }
        for pod, pair in WAITS.items()
        for kind, steps in zip(("sum", "count"), pair, strict=True)
    ]
    samples = [{"labels": labels, "value": value} for labels, value in values.items()]
    expression = {"expr": query, "eval_time": "5m", "exp_samples": samples}
    test = {"interval": "30s", "input_series": series, "promql_expr_test": [expression]}
    (folder / "test.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = promtool("test", "rules", folder / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_keda_scales_the_chart_as_its_own_autoscaler_does(tmp_path: Path) -> None:
    [scaled] = p.documents(ROOT / "deploy/helm/keda.example.yaml")
    documents = rendered(values=(*MONITORED, "autoscaling.cpuUtilization=0"))
    own, spec = document_of(documents, "HorizontalPodAutoscaler")["spec"], scaled["spec"]
    deployment = document_of(documents, "Deployment")["metadata"]
    assert spec["scaleTargetRef"]["name"] == deployment["name"]
    for bound in ("min", "max"):
        assert spec[f"{bound}ReplicaCount"] == own[f"{bound}Replicas"]
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == own["behavior"]
    [trigger], [metric] = spec["triggers"], own["metrics"]
    threshold = float(trigger["metadata"]["threshold"])
    assert metric["pods"]["target"]["averageValue"] == f"{threshold * 1000:.0f}m"
    assert trigger["metricType"] == "Value"
    # Of pods a and b of its own namespace; pod c is of another one.
    check_query(tmp_path, trigger["metadata"]["query"], {"{}": 0.25}, namespace="other")


def test_a_package_of_it_renders_the_same(tmp_path: Path) -> None:
    assert helm("package", CHART, "--destination", tmp_path).returncode == 0
    packed = tmp_path / f"hallutracer-{__version__}.tgz"
    assert rendered(values=MONITORED, chart=packed) == rendered(values=MONITORED)


def test_the_adapters_query_is_the_mean_wait_of_each_pod_and_zero_where_nothing_came(
    tmp_path: Path,
) -> None:
    [rule] = p.documents(ROOT / "deploy/helm/prometheus-adapter.yml")[0]["rules"]["custom"]
    matchers = 'namespace="hallutracer",pod=~"a|b"'
    query = (
        rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", matchers)
    )
    check_query(tmp_path, query, {'{pod="a"}': 0.5, '{pod="b"}': 0.0})
    assert re.match(rule["seriesQuery"].partition("{")[0], "hallutracer_queue_seconds_count")
