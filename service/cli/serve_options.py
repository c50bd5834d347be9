"""What ``serve`` and ``doctor`` are told beside engine, bundles and settings: access, rollout,
and the options of annexes."""

from __future__ import annotations

import inspect
import logging
import re
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, get_args

from service import settings
from service.access.callers import ApiKey, Right, is_placeholder, on_loopback
from service.annexes import annexes, imported
from service.cli.options import UsageError
from service.errors import HalluTracerError
from service.policies.policy import Policies, load_policies
from service.settings import DEFAULT_MESSAGE, DEFAULT_SHARE, Range, option, section

if TYPE_CHECKING:
    from service.access.keys import KeyRing
    from service.serving.catalogue import RolloutPlan
    from service.serving.metrics import Metrics

log = logging.getLogger("hallutracer")
Command = TypeVar("Command", bound=Callable[..., None])
_HOST = re.compile(
    r"[\w.-]+|[\da-fA-F.]*(:[\da-fA-F.]*){2,}(%[\w.-]+)?"
)  # a name or IPv4 address, or one of IPv6
LEAST_CHARACTERS = 16  # of a key
CURE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"


@section("Access and policies", 35)
@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Who may call the service, and the policies it knows."""

    policies: settings.PoliciesFile = None
    abstain_message: settings.AbstainMessage = DEFAULT_MESSAGE
    api_key: Annotated[
        tuple[str, ...],
        option(
            "Bearer key, repeatable; guards every route but health and metrics.  Default, on"
            " loopback: none.",
            secret=True,
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        option(
            "File of bearer keys, one per line: KEY [name=NAME]"
            " [may=policy,threshold,bundle,feedback].  The name stands in the log; may: see"
            " --callers-may."
        ),
    ] = None
    keys: settings.KeysFile = None
    allow_anonymous: Annotated[
        bool,
        option(
            "Listen beyond loopback without keys: whoever reaches the port may use the service."
        ),
    ] = False
    audit_log: settings.AuditLogFile = None
    audit_required: settings.AuditRequired = False

    def ring(self, policies: Collection[str] | None = None) -> KeyRing:
        """Return all keys; ``policies``: those that a key may name.  Raises what is wrong with a
        key or a file."""
        from service.access.keys import KeyRing

        plain = load_keys(self.api_key, self.api_key_file)
        return KeyRing([key.hashed() for key in plain], self.keys, policies)

    def rules(self, policy: str) -> tuple[Policies, KeyRing]:
        """Return the policies, of which ``policy`` is the default, and all keys.  Raises what is
        wrong with a file."""
        policies = load_policies(self.policies, self.abstain_message, policy)
        keys = self.ring(policies.named)
        for rule in policies.rules:
            rule.check_key(keys.names)
        return policies, keys

    def check_open(self, host: str, protect_metrics: bool, keys: KeyRing) -> bool:
        """Return whether everybody may use the service.

        Raises UsageError where nobody said that it is meant, and for a host that is more than one
        or none."""
        if not _HOST.fullmatch(host):
            cure = "give one such as 127.0.0.1, ::1 or :: (all); the port has --port"
            raise UsageError("--host", f"{host!r} is no name or address alone: {cure}")
        everybody = not (keys.closed or on_loopback(host))
        if everybody and not self.allow_anonymous:
            cure = "give --keys, --api-key-file or --allow-anonymous"
            raise UsageError("--host", f"whoever reaches {host} could use the service; {cure}")
        if protect_metrics and not keys.closed:
            raise UsageError("--protect-metrics", "needs --keys, --api-key or --api-key-file")
        return everybody

    def check_audit(self) -> None:
        """Raise UsageError for an audit log that must be written, and is none."""
        if self.audit_required and self.audit_log is None:
            raise UsageError("--audit-required", "give --audit-log, too")


@section("Rollout", 36)
@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """A new version of the probes beside the one that serves."""

    canary: Annotated[
        str | None,
        option(
            "Bundle that judges --canary-share of the requests that name none, such as NAME@canary."
        ),
    ] = None
    canary_share: Annotated[
        float,
        option(
            "Share of the canary; requests of one x-session-id, or of one first question, stay"
            " together.",
            limits=Range(0, 1),
        ),
    ] = DEFAULT_SHARE
    canary_key: Annotated[
        str | None,
        option(
            "What the canary's sessions are drawn with; give replicas behind one address the same,"
            " so that a session stays with its bundle.  Default: one that each process makes for"
            " itself.",
            secret=True,
        ),
    ] = None
    shadow: Annotated[
        tuple[str, ...],
        option(
            "Bundle that reads every prompt on the same forward and decides nothing, repeatable;"
            " /metrics and /v1/bundles tell how far it disagrees."
        ),
    ] = ()
    watch_s: Annotated[
        float,
        option(
            "Look every so many seconds whether an alias has moved, and reload where one has; 0: at"
            " a SIGHUP and POST /v1/admin/reload only.",
            limits=Range(0),
        ),
    ] = 0.0
    replay_s: Annotated[
        float,
        option(
            "Replay the golden prompts so often while serving, and be not ready while they are off;"
            " 0: never.",
            limits=Range(0),
        ),
    ] = 600.0

    @property
    def plan(self) -> RolloutPlan:
        """Return what the service is told.  Raises UsageError for a secret that can be guessed."""
        from service.serving.catalogue import RolloutPlan

        if self.canary_key is None:
            return RolloutPlan(self.canary, self.canary_share, self.shadow)
        if is_placeholder(self.canary_key) or len(self.canary_key) < LEAST_CHARACTERS:
            raise UsageError(
                "--canary-key", f"needs at least {LEAST_CHARACTERS} characters: {CURE}"
            )
        secret = self.canary_key.encode("utf-8", "surrogateescape")
        return RolloutPlan(self.canary, self.canary_share, self.shadow, secret)


class AnnexOptions(Protocol):
    """What `serve` is told for an annex."""

    def hooks(self) -> Mapping[str, Callable[[Metrics], Any]]:
        """Return, for each field of a ``Service`` that the annex fills, what makes it.  Raises what
        is wrong with an option."""


def takes_annex_options(command: Command) -> Command:
    """Give a command, before its last parameter, another for each annex with options: the annex's
    name.

    The command itself takes them as ``**`` of any name."""
    signature = inspect.signature(command)
    *first, last, _ = signature.parameters.values()
    kinds = {annex.name: imported(annex.options) for annex in annexes() if annex.options}
    added = [
        inspect.Parameter(name, last.kind, default=kind(), annotation=kind)
        for name, kind in kinds.items()
    ]
    with_added = signature.replace(parameters=[*first, *added, last])
    command.__signature__ = with_added  # type: ignore[attr-defined]
    return command


def load_keys(secrets: tuple[str, ...], path: Path | None) -> tuple[ApiKey, ...]:
    """Return the keys of the options and of the file, whose lines are ``KEY [name=NAME]
    [may=policy,threshold]``.

    Raises HalluTracerError, also for a file without a key: it must not open the service."""
    keys = [
        _key(secret, [], "--api-key", f"key-{number}") for number, secret in enumerate(secrets, 1)
    ]
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise HalluTracerError(f"cannot read the keys file {path}: {error}") from None
        if mode & stat.S_IWOTH:
            raise HalluTracerError(
                f"anyone on this machine can write to the keys file {path}; run: chmod o-w {path}"
            )
        if mode & stat.S_IROTH:
            log.warning(
                "anyone on this machine can read the keys file %s; run: chmod o-r %s", path, path
            )
        for number, line in enumerate(lines, 1):
            if line and not line.startswith("#"):
                secret, *words = line.split()
                keys.append(_key(secret, words, f"line {number} of {path}", f"key-{len(keys) + 1}"))
        if len(keys) == len(secrets):
            raise HalluTracerError(f"the keys file {path} holds no key; put one on each line")
    if len({key.secret for key in keys}) < len(keys):
        raise HalluTracerError("the same key is given twice")
    names = [key.name for key in keys]
    if twice := [name for name in names if names.count(name) > 1]:
        raise HalluTracerError(
            f"two keys are named {twice[0]!r}; in the log they could not be told apart"
        )
    return tuple(keys)


def _key(secret: str, words: list[str], where: str, default_name: str) -> ApiKey:
    """Return a key with the attributes in ``words``.  The key itself is never part of a message."""
    attributes: dict[str, str] = {}
    for word in words:
        attribute, _, value = word.partition("=")
        if attribute not in ("name", "may") or attribute in attributes:
            shown = repr(word) if "=" in word else "a word without '='"  # which may be another key
            raise HalluTracerError(
                f"{where}: after the key may stand name=NAME and may=FIELD,..; found {shown}"
            )
        attributes[attribute] = value
    rights = tuple(filter(None, attributes.get("may", "").split(",")))
    if unknown := [right for right in rights if right not in get_args(Right)]:
        raise HalluTracerError(
            f"{where}: may= takes {', '.join(get_args(Right))}; found {unknown[0]!r}"
        )
    name = attributes.get("name", default_name)
    if not name or not name.isprintable() or len(name) > 64:
        raise HalluTracerError(f"{where}: a name has 1 to 64 printable characters")
    if secret.split() != [secret] or not secret.isprintable() or not secret.isascii():
        raise UsageError(
            where, "a key is one word of ASCII characters, since headers carry no others"
        )
    if is_placeholder(secret):
        raise UsageError(
            where, f"this is an example's placeholder, which everybody knows, and not a key: {CURE}"
        )
    if len(secret) < LEAST_CHARACTERS:
        raise UsageError(where, f"a key has at least {LEAST_CHARACTERS} characters: {CURE}")
    return ApiKey(secret, name, frozenset(rights))  # type: ignore[arg-type]
