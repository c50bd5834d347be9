"""Write deploy/helm/hallutracer/values.schema.json; ``options`` from the declarations of
``hallutracer serve``.

Run it after a change of an option of ``serve`` or of values.yaml; a test compares its output with
the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from service.cli.main import make_app
from service.options import COMMON, Sources, commands_of, key_of, options_of
from service.settings import DATABASE, SECRET, Range

TARGET = Path(__file__).parent / "hallutracer" / "values.schema.json"
# What the chart decides itself, and what may hold a password: that comes from a Secret (extraEnv).
OWN = frozenset({"host", "port", "policies", "api_key_file"})
WORD = {
    "type": "string",
    "pattern": r"^\S+$",
}  # a variable separates the entries of a list by spaces
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"}
VARIABLE = {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}
MAYBE_NAME = {"anyOf": [{"const": ""}, NAME]}
QUANTITY = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
FREE = {"type": "object"}  # Kubernetes' own; checked by the API server
COUNT = {"type": "integer", "minimum": 1}


def of(hint: Any) -> dict[str, Any]:
    """The JSON schema of an option's type."""
    if get_origin(hint) is Annotated:
        return of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        [kind] = [one for one in get_args(hint) if one is not NoneType]
        return of(kind)
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        inner = of(get_args(hint)[0])
        return {
            "type": "array",
            "items": WORD if inner == {"type": "string"} else inner,
            "minItems": 1,
        }
    names: dict[Any, str] = {bool: "boolean", int: "integer", float: "number"}
    return {"type": names.get(hint, "string")}


def options() -> dict[str, Any]:
    """Every option of ``serve`` by its key in the configuration file, its limits and its help."""
    found: dict[str, Any] = {}
    [arguments] = [
        arguments for path, arguments in commands_of(make_app(Sources({}))) if path == ("serve",)
    ]
    for argument in options_of(arguments):
        key = key_of(argument)
        if (
            argument.name in COMMON
            or key in OWN
            or argument.parameter.metavar in (SECRET, DATABASE)
        ):
            continue
        schema = of(argument.hint)
        for limits in argument.parameter.validator or ():
            if isinstance(limits, Range) and schema["type"] in ("integer", "number"):
                bounds = {"minimum": limits.least, "maximum": limits.most}
                schema |= {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
                schema |= {"exclusiveMinimum": 0} if limits.positive else {}
        if key == "store":  # the folder is the chart's own, where the claim is mounted
            schema |= {"pattern": r"^[a-z0-9]+://\S+$"}
        if key == "bundle":  # one is the rule, and --set options.bundle=NAME gives a string
            schema = {"anyOf": [schema, WORD]}
        found[key] = schema | {"description": argument.parameter.help}
    return dict(sorted(found.items()))


def closed(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(required),
    }


def schema() -> dict[str, Any]:
    """The whole schema; unknown keys are refused at every level that is ours."""
    claim = closed(
        {
            "claim": {"type": "boolean"},
            "size": QUANTITY,
            "storageClass": MAYBE_NAME,
            "accessModes": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
                },
            },
        },
        ("claim", "size", "accessModes"),
    )
    variable = {
        "oneOf": [
            closed(
                {
                    "name": VARIABLE | {"not": {"pattern": "^HALLUTRACER_"}},
                    "value": {"type": "string"},
                },
                ("name", "value"),
            ),
            closed({"name": VARIABLE, "valueFrom": FREE}, ("name", "valueFrom")),
        ],
        "description": (
            "HALLUTRACER_ variables stand under options; those that hold a secret use valueFrom"
        ),
    }
    document = closed(
        {
            "image": closed(
                {
                    "repository": {"type": "string", "minLength": 1},
                    "tag": {"type": "string"},
                    "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
                    "pullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]},
                    "pullSecrets": {"type": "array", "items": NAME},
                },
                ("repository",),
            ),
            "options": closed(options(), ("drain_s",)),
            "apiKeys": closed({"secret": MAYBE_NAME}, ("secret",)),
            "policies": {"type": "string", "minLength": 1},
            "user": closed(dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), COUNT)),
            "gpus": {"type": "integer", "minimum": 0},
            "huggingFaceSecret": MAYBE_NAME,
            "replicas": COUNT,
            "strategy": FREE,
            "startupSeconds": {"type": "integer", "minimum": 5},
            "resources": closed({"requests": FREE, "limits": FREE}, ("requests", "limits")),
            "autoscaling": closed(
                {
                    "enabled": {"type": "boolean"},
                    "minReplicas": COUNT,
                    "maxReplicas": COUNT,
                    "cpuUtilization": {"type": "integer", "minimum": 0},
                    "queueWait": closed(
                        {
                            "enabled": {"type": "boolean"},
                            "seconds": {"type": "number", "minimum": 0.001},
                        }
                    ),
                    "scaleDownSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
                },
                ("enabled",),
            ),
            "podDisruptionBudget": closed(
                {
                    "enabled": {"type": "boolean"},
                    "maxUnavailable": {
                        "oneOf": [COUNT, {"type": "string", "pattern": "^[1-9][0-9]?%$"}]
                    },
                },
                ("enabled",),
            ),
            "networkPolicy": closed(
                {
                    "enabled": {"type": "boolean"},
                    "clients": TEXTS | {"minProperties": 1},
                    "monitoringNamespace": MAYBE_NAME,
                    "egress": {"type": "array", "items": FREE},
                },
                ("enabled", "clients"),
            ),
            "storage": closed(
                {
                    "probes": claim,
                    "huggingface": claim,
                    "tmp": QUANTITY,
                    "shm": {"anyOf": [{"const": ""}, QUANTITY]},
                }
            ),
            "podMonitor": closed(
                {
                    "enabled": {"type": "boolean"},
                    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                    "labels": TEXTS,
                    "keySecret": MAYBE_NAME,
                }
            ),
            "prometheusRule": closed(
                {
                    "enabled": {"type": "boolean"},
                    "labels": TEXTS,
                    "runbookUrl": {"type": "string", "pattern": "^[^\\s#]+$"},
                    "grafanaUrl": {"type": "string", "pattern": "^(https?://[^\\s?#]*[^\\s?#/])?$"},
                }
            ),
            "podAnnotations": TEXTS,
            "podLabels": TEXTS,
            "nodeSelector": TEXTS,
            "tolerations": {"type": "array", "items": FREE},
            "affinity": FREE,
            "priorityClassName": MAYBE_NAME,
            "extraEnv": {"type": "array", "items": variable},
            "global": FREE,  # Helm's own
        }
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "hallutracer"} | document


def text() -> str:
    """The file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
