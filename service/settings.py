"""The service's settings and the declarations behind flags, environment variables and configuration
keys.

An option is declared once, as an annotated type (``Port = Annotated[int, option(...)]``) that a
frozen dataclass gives a default.  ``--port``, ``HALLUTRACER_PORT`` and the configuration key
``port`` all follow from it, and ``service.options`` reads them, for the command line and for the
vLLM plugin.  Nothing else in the project reads a ``HALLUTRACER_`` variable."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from service.access.callers import Loosened

PREFIX = "HALLUTRACER_"
NO_OPTIONS = frozenset(
    {f"{PREFIX}CACHE"}
)  # variables alone: where unpacked GGUF files are kept, below all commands
DEFAULT_STORE = (  # looked up first; the bundles shipped with the package come second
    "~/.hallutracer/probes"
)
DEFAULT_MESSAGE = "I am not sure."
DEFAULT_SHARE = 0.05  # of a canary
DEFAULT_DRAWN = 0.05  # of the unflagged answers, to be labelled
KV_TOKENS = (
    16_384  # prompt and answer tokens of all answers being decoded: each holds its keys and values
)
SPARE_FILES = 128  # open files of the service that are not connections
LEAST_CONNECTIONS = 16
MOST_PROMPTS = 4096  # of one request, whatever the operator allows
SECRET = "KEY"  # the metavar of values that are never printed
DATABASE = "FILE|URL"  # and of addresses, which are not printed either: they may hold a password


def env(flag: str) -> str:
    """Return the variable behind ``--flag``: ``max-batch-tokens`` ->
    ``HALLUTRACER_MAX_BATCH_TOKENS``."""
    return PREFIX + flag.removeprefix("--").replace("-", "_").upper()


NEVER_EMPTY = (env("api-key"), env("api-key-file"), env("keys"), env("audit-log"))
"""Variables that are an error when set to nothing: a missing key must not open the service."""
CLOSES = frozenset(
    map(
        env,
        (
            "api-key",
            "api-key-file",
            "audit-required",
            "keys",
            "policies",
            "policy",
            "protect-metrics",
            "refuse-special-tokens",
            "require-signature",
            "threshold",
        ),
    )
)
"""Variables that keep somebody out or withhold something: a name that is nearest to one of these,
and is none, is an error, because the service would be open without it."""


@dataclass(frozen=True, slots=True)
class Range:
    """A validator: every number of the value is finite and within the bounds.  Raises
    ValueError."""

    least: float = -math.inf
    most: float = math.inf
    positive: bool = False

    def __call__(self, _hint: Any, value: Any) -> None:
        """Check the converted value; called by cyclopts."""
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if not math.isfinite(number):
                raise ValueError("Must be a finite number.")
            if not self.least <= number <= self.most or (self.positive and not number > 0):
                raise ValueError(f"Must be {self}.")

    def __str__(self) -> str:
        bounds = (
            f">= {self.least:g}" if math.isinf(self.most) else f"{self.least:g} to {self.most:g}"
        )
        return "> 0" if self.positive else bounds


def option(
    help: str,
    *names: str,
    limits: Range | None = None,
    secret: bool = False,
    metavar: str | None = None,
    group: Group | str | None = None,
    everyday: bool = False,
) -> Parameter:
    """Declare an option: its help, its name where the field's own will not do (then older names),
    and its limits.

    A secret is masked wherever options are printed.  ``everyday``: shown also where a command with
    many options shows the few that most people use.  ``group``: where it stands in the help, if not
    in its class's section."""
    shown: dict[str, Any] = (
        {"show": True} if everyday else {}
    )  # None would be a value, and win over the command's own
    shown |= {} if group is None else {"group": group}
    return Parameter(
        name=tuple(f"--{name}" for name in names) or None,
        help=f"{help} [{limits}]" if limits else help,
        validator=limits,
        metavar=SECRET if secret else metavar,
        show_default=_shown,
        **shown,
    )


def _shown(default: Any) -> str | None:
    if default in (None, (), "", False):
        return None
    return (
        str(default).replace(os.path.expanduser("~"), "~", 1)
        if isinstance(default, Path)
        else str(default)
    )


def section(title: str, order: int) -> Parameter:
    """Decorate a class whose fields are options of their own, under this title in the help."""
    return Parameter(
        name="*", group=Group(title, sort_key=order), negative_iterable="", negative_none=""
    )


AT_LEAST_1 = Range(1)

MaxQueue = Annotated[int, option("Prompts that may wait; further ones get 429.", limits=AT_LEAST_1)]
DeadlineS = Annotated[
    float, option("Longest time of one request; then 504.", limits=Range(positive=True))
]
Threshold = Annotated[
    float | None,
    option(
        "Flag a prompt at or above this risk.  Default: the bundle's own.",
        limits=Range(0, 1),
        everyday=True,
    ),
]
PolicyName = Annotated[
    str,
    option(
        "What becomes of a flagged prompt (its risk reaches the threshold) where a request names"
        " no policy: observe answers and tells the risk, gate withholds and shows the abstain"
        " message, block shows nothing; or a name in --policies.",
        everyday=True,
    ),
]
CallersMay = Annotated[
    tuple[Loosened, ...],
    option(
        "What a request may choose although more answers pass then, repeatable.  policy: one that"
        " withholds less.  threshold: a higher one.  bundle: another.  rendering: in vLLM's server,"
        " fields such as continue_final_message.  feedback: to label other callers' answers.  none:"
        " nothing of these.  Default: policy and threshold for programs and pages of this machine"
        " where a service on loopback asks for no key, else none.  What is stricter is always"
        " taken."
    ),
]

KeysFile = Annotated[
    Path | None,
    option(
        "TOML file of named keys with scopes and an end; it holds no secrets.  'hallutracer keys"
        " make' prints the lines of a key; a running service reads the file again when it changes.",
        everyday=True,
    ),
]
AuditLogFile = Annotated[
    Path | None,
    option(
        "Append who did what, and what was decided, to this file: JSON lines, never a prompt. "
        " 'hallutracer audit verify' reads it.  Default: none."
    ),
]
AuditRequired = Annotated[
    bool,
    option(
        "Answer 503 where a decision cannot be written to --audit-log, instead of counting it as"
        " missed."
    ),
]

BundleNames = Annotated[
    tuple[str, ...],
    option(
        "Bundle that reads the model, as name, name@alias or name:version, with @sha256:DIGEST to"
        " pin it; repeatable to serve several, the first is the default.",
        "bundle",
        everyday=True,
    ),
]
AdapterFolders = Annotated[
    tuple[str, ...],
    option(
        "Folder of a LoRA adapter that requests run with and a bundle reads, where something else"
        " than vLLM's own server holds its engine; repeatable.",
        "adapters",
    ),
]
StorePlace = Annotated[
    str,
    option(
        "Folder or URL (s3://BUCKET/PREFIX, gs://, az://, hf://OWNER/NAME) of published bundles;"
        " those shipped with the package are found as well.",
        everyday=True,
    ),
]
StoreCache = Annotated[
    Path | None,
    option(
        "Folder for copies of bundles from a URL, so that each is fetched once.  Default:"
        " ~/.cache/hallutracer/stores."
    ),
]
RequireSignature = Annotated[
    str | None,
    option(
        "Load only bundles of the store that are signed ('hallutracer bundle sign') by this public"
        " key or under these certificates, a PEM file, or by sigstore:IDENTITY@ISSUER.",
        metavar="FILE|IDENTITY",
    ),
]
AllowOpenStore = Annotated[
    bool,
    option("Read bundles from a folder that anyone on this machine can write to."),
    Parameter(negative=""),
]
PoliciesFile = Annotated[
    Path | None,
    option(
        "TOML file of named policies: [name] action ="
        " observe|annotate|abstain|block|retrieve|fallback, threshold, message.",
        everyday=True,
    ),
]
AbstainMessage = Annotated[
    str, option("The message in place of an answer that a policy with action abstain withholds.")
]
DecodingChoice = Literal["bundle", "openai"]
Decoding = Annotated[
    DecodingChoice | None,
    option(
        "How an answer is decoded where a request names no temperature.  bundle: as the answers"
        " were that the risk is about, greedily where the bundle does not say.  openai: as that API"
        " does, at temperature 1, and in vLLM's own server by the model's generation_config. "
        " Default: bundle; in vLLM's own server openai under a policy that observes."
    ),
]
MessageInContent = Annotated[
    bool,
    option(
        "Give a withheld answer's message as its text, too, for clients that show nothing else."
    ),
]


@section("Service", 30)
@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """How the service listens, how much it takes on, and what it refuses."""

    host: Annotated[str, option("Address to listen on.", everyday=True)] = (
        "127.0.0.1"  # opening up is a decision
    )
    port: Annotated[int, option("0: any free port.", limits=Range(0, 65535), everyday=True)] = 8765
    max_queue: MaxQueue = 1024
    max_wait_ms: Annotated[  # only where the previous batch had more than one prompt
        float,
        option(
            "Batching delay: how long a batch may wait for further prompts.", limits=Range(0, 1000)
        ),
    ] = 2.0
    deadline_s: DeadlineS = 30.0  # a request's own deadline_ms included
    stall_s: Annotated[
        float,
        option(
            "Not ready while prompts wait and the engine has given nothing for so long, waits for a"
            " CPU left out.",
            limits=Range(positive=True),
        ),
    ] = 20.0  # a forward pass over a long prompt gives nothing meanwhile
    drain_s: Annotated[
        float,
        option(
            "How long running requests may take to finish after SIGTERM or Ctrl-C.", limits=Range(0)
        ),
    ] = 30.0
    max_prompts: Annotated[
        int, option("Prompts in one request.", limits=Range(1, MOST_PROMPTS))
    ] = 256
    max_new_tokens: Annotated[
        int,
        option(
            "Upper limit of a request's generate.max_tokens.",
            "max-completion-tokens",
            "max-new-tokens",
            limits=AT_LEAST_1,
        ),
    ] = 1024
    max_kv_tokens: Annotated[
        int,
        option("Prompt and answer tokens of all answers being decoded at once.", limits=AT_LEAST_1),
    ] = KV_TOKENS
    max_connections: Annotated[
        int,
        option(
            "Open connections; a further one takes the place of the one without progress for"
            " longest.",
            limits=Range(LEAST_CONNECTIONS),
        ),
    ] = 4096
    keep_alive_s: Annotated[
        float,
        option(
            "Close a connection that has sent no request for so long; longer than a balancer keeps"
            " an idle one.",
            limits=Range(positive=True),
        ),
    ] = 75.0
    max_body_bytes: Annotated[int, option("Largest request body.", limits=Range(1024))] = (
        4 * 1024 * 1024
    )
    refuse_special_tokens: Annotated[
        bool,
        option(
            "Refuse messages that spell out special tokens of the model, instead of reading them as"
            " text."
        ),
    ] = False
    threshold: Threshold = None  # for policies that name none; None: each bundle's own
    policy: PolicyName = "observe"  # for requests that name none
    protect_metrics: Annotated[bool, option("Require a key on /metrics too.")] = False
    playground: Annotated[
        bool,
        option(
            "Serve the playground at /, a page to ask questions and look at their risks; else / is"
            " a 404."
        ),
    ] = True
    model_names: Annotated[
        tuple[str, ...],
        option(
            "Name that requests may give the model beside its own, repeatable; *: any.",
            "served-model-name",
        ),
    ] = ()
    message_in_content: MessageInContent = False
    decoding: Decoding = None
    cors_origins: Annotated[
        tuple[str, ...],
        option(
            "Origin whose pages may call the service, repeatable.  Default: none.", "cors-origin"
        ),
    ] = ()  # none: no cross-origin page may read an answer
    allowed_hosts: Annotated[
        tuple[str, ...],
        option(
            "Host name, without a port, that requests may be addressed to beside IP addresses,"
            " repeatable; *: any.  Default: localhost, beyond loopback this machine's name too; any"
            " where keys are asked for there.",
            "allowed-host",
        ),
    ] = ()  # none: any; serve puts its default here
    callers_may: CallersMay = ()
