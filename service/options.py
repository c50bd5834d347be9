"""Where an option's value comes from: flag, then environment variable, then configuration file,
then default.

The configuration file is TOML: a table for each command, and keys above the tables for every
command that has them.

    model = "./my-model"

    [serve]
    port = 9000
    api_key_file = "keys.txt"

An unknown key, a value of another type and a value out of range are errors wherever they stand.  Of
cyclopts' own configurations ``Env`` gives names and help alone: it takes an empty variable for a
value, and ``Toml`` has no shared keys and converts ``port = "9"``."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import App, CycloptsError, Parameter, Token
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.config import Env

from service.annexes import annexes
from service.errors import HalluTracerError
from service.settings import (
    CLOSES,
    DATABASE,
    NEVER_EMPTY,
    NO_OPTIONS,
    PREFIX,
    SECRET,
    env,
    option,
    section,
)

T = TypeVar("T")
Command = tuple[str, ...]  # ("bundle", "list")
COMMON = (
    "--config",
    "--print-config",
)  # said on the command line or, the first, by a variable; never in the file


@section("Configuration", 90)
@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    config: Annotated[
        Path | None,
        option(
            "TOML file of options: one table per command; keys above the tables are shared.",
            everyday=True,
        ),
    ] = None
    print_config: Annotated[
        bool,
        option("Print the effective options as TOML, each with its source, and exit."),
        Parameter(negative="", show_env_var=False),
    ] = False
    warnings: Annotated[
        tuple[str, ...], Parameter(parse=False)
    ] = ()  # about the environment, for services to log


class Sources(Env):
    """Fills the options that the command line left open, from the environment and the configuration
    file."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, root: Callable[[], App] | None = None
    ) -> None:
        super().__init__(PREFIX, command=False)
        self.environment = os.environ if environment is None else environment
        self.root = (
            root  # makes the app with all commands, whose tables a configuration file may hold
        )
        self.commands: Command = ()  # of the last parse, as are the arguments
        self.arguments: Sequence[Argument] = ()

    def __call__(self, app: App, commands: Command, arguments: ArgumentCollection) -> None:
        """Called by cyclopts between reading the command line and converting values.  Raises
        CycloptsError."""
        self.commands, self.arguments = commands, arguments
        for argument in options_of(arguments):
            if argument.tokens or argument.name == "--print-config":
                continue
            name = env(argument.name)
            text = self.environment.get(name)
            if (
                text == "" and name in NEVER_EMPTY
            ):  # other empty variables are unset: compose files pass them
                raise CycloptsError(msg=f"{name} is set but empty; unset it or give a value.")
            _fill(argument, argument.env_var_split(text) if text else (), name, "the environment")
        path = next(
            (a.tokens[0].value for a in arguments if a.name == "--config" and a.tokens), None
        )
        if path is not None and self.root is not None:
            self._from_file(path, self.root())

    def _from_file(self, path: str, root: App) -> None:
        try:
            # "-sig": editors on Windows begin a file with a byte order mark
            document = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise CycloptsError(
                msg=f"Cannot read the configuration file {path}: {error.strerror or error}."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CycloptsError(msg=f"{path} is not TOML: {error}.") from None
        _check(document, path, dict(commands_of(root)))
        # A name may be both: [bundle.list] is a table, bundle = ["a"] an option.
        options = {
            key: (key, value) for key, value in document.items() if not isinstance(value, dict)
        }
        for command in _tables_of(self.commands):
            table: Any = document
            for name in command:
                table = table.get(name, {}) if isinstance(table, dict) else {}
            options |= {key: (".".join((*command, key)), table[key]) for key in table}
        for argument in options_of(self.arguments):
            if (
                not argument.tokens
                and argument.name not in COMMON
                and (key := key_of(argument)) in options
            ):
                keyword, value = options[key]
                values = value if isinstance(value, list) else [value]
                texts = [
                    str(item).lower() if isinstance(item, bool) else str(item) for item in values
                ]
                _fill(argument, texts, keyword, path)

    def unknown(self) -> tuple[str, ...]:
        """Return a warning for each ``HALLUTRACER_`` variable that no command reads, or that is an
        older name.

        Raises CycloptsError where one was probably meant to close what is open without it."""
        read_here = {env(argument.name): argument for argument in options_of(self.arguments)}
        unread = sorted(
            name for name in self.environment if name.startswith(PREFIX) and name not in read_here
        )
        every = (
            [arguments for _, arguments in commands_of(self.root())] if unread and self.root else []
        )
        known = {
            *read_here,
            *NO_OPTIONS,
            *(env(argument.name) for arguments in every for argument in options_of(arguments)),
        }
        older = {
            env(old): name
            for name, argument in read_here.items()
            for old in list(argument.parameter.name or ())[1:]
        }
        warnings = []
        for name in unread:
            if name in older:
                warnings.append(f"{name} is not read here; the variable is {older[name]}")
            elif name not in known:
                short = [variable.removeprefix(PREFIX) for variable in sorted(known)]
                close = difflib.get_close_matches(
                    name.removeprefix(PREFIX), short, n=1, cutoff=0.75
                )
                nearest = PREFIX + close[0] if close else ""
                argument = read_here.get(nearest)
                set_here = argument is None or argument.tokens
                if self.environment[name] and nearest in CLOSES and not set_here:
                    raise CycloptsError(
                        msg=f"{name} is not read, and {nearest} is not set: correct the name, or"
                        " unset it."
                    )
                warnings.append(
                    f"{name} is not read here" + (f"; did you mean {nearest}?" if close else "")
                )
        return tuple(warnings)

    def values(self) -> dict[str, Any]:
        """Return the converted value of each option of the last parse, by its configuration key."""
        return {
            key_of(a): a.value if a.tokens else a.field_info.default
            for a in options_of(self.arguments)
        }

    def effective(self) -> str:
        """Return the options of the last parse as TOML, each with its source; secrets are
        masked."""
        lines, values = [f"[{'.'.join(self.commands)}]"], self.values()
        for argument in options_of(self.arguments):
            if argument.name in COMMON:
                continue
            value, source = values[key_of(argument)], "default"
            if argument.tokens:
                token = argument.tokens[0]
                source = (
                    "command line"
                    if token.source == "cli"
                    else f"{token.keyword} in {token.source}"
                )
            hidden = value and argument.parameter.metavar in (SECRET, DATABASE)
            text = '"***"' if hidden else "" if value is None else _toml(value)
            lines.append(
                f"{'# ' if hidden or value is None else ''}{key_of(argument)} = {text}  # {source}"
            )
        return "\n".join(lines)


def parse(cls: type[T], environment: Mapping[str, str] | None = None) -> tuple[T, tuple[str, ...]]:
    """Return the options of a dataclass from the environment alone, and warnings; raises
    HalluTracerError."""
    app = App(config=[sources := Sources(environment)], result_action="return_value")
    app.default(cls)
    try:
        options = app([], exit_on_error=False, print_error=False)
        return options, sources.unknown()
    except CycloptsError as error:
        raise HalluTracerError(one_line(error)) from None


def options_of(arguments: Iterable[Argument]) -> Iterator[Argument]:
    """Return the arguments that are options: neither positional nor a dataclass of options."""
    return (
        a
        for a in arguments
        if a.parse and a.index is None and not a.children and a.name.startswith("--")
    )


def key_of(argument: Argument) -> str:
    """Return the configuration key: ``--max-queue`` -> ``max_queue``."""
    return argument.name.removeprefix("--").replace("-", "_")


def one_line(error: CycloptsError) -> str:
    """Return in one line what was wrong with an option."""
    return " ".join(str(error).split())


def _tables_of(command: Command) -> tuple[Command, ...]:
    """Return the commands whose tables hold for ``command``; its own, which goes before, is
    last."""
    others: dict[str, str] = {}
    for annex in annexes():
        others |= annex.tables
    other = others.get(" ".join(command))
    return (command,) if other is None else ((other,), command)


def commands_of(app: App, path: Command = ()) -> Iterator[tuple[Command, ArgumentCollection]]:
    """Yield each command with its arguments."""
    for name in app:
        if name.startswith("-"):
            continue
        child = app[name]
        if child.default_command is not None:
            yield (*path, name), child.assemble_argument_collection()
        yield from commands_of(child, (*path, name))


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return (
        repr(value)
        if isinstance(value, int | float)
        else json.dumps(str(value), ensure_ascii=False)
    )


def _fill(argument: Argument, texts: Iterable[str], keyword: str, source: str) -> None:
    for index, text in enumerate(texts):
        argument.append(Token(keyword=keyword, value=text, source=source, index=index))


def _check(
    document: Mapping[str, Any],
    path: str,
    commands: Mapping[Command, ArgumentCollection],
    table: Command = (),
) -> None:
    """Refuse keys that no command has and values of another type, in every table."""
    here = [arguments for command, arguments in commands.items() if not table or command == table]
    known = {
        key_of(a): a for arguments in here for a in options_of(arguments) if a.name not in COMMON
    }
    tables = {
        command[len(table)]
        for command in commands
        if command[: len(table)] == table and command != table
    }
    for key, value in document.items():
        dotted = ".".join((*table, key))
        if key in tables and isinstance(value, dict):
            _check(value, path, commands, (*table, key))
        elif key not in known:
            close = difflib.get_close_matches(key, [*known, *tables], n=1)
            hint = (
                f"did you mean {close[0]}?"
                if close
                else f"known: {', '.join(sorted({*known, *tables}))}."
            )
            what = "table" if isinstance(value, dict) else "key"
            raise CycloptsError(msg=f"{path}: unknown {what} {dotted}; {hint}")
        elif fault := _misfit(value, known[key].hint):
            got = "" if known[key].parameter.metavar in (SECRET, DATABASE) else f", not {value!r}"
            raise CycloptsError(msg=f"{path}: {dotted}: {fault}{got}.")


def _misfit(value: Any, hint: Any) -> str | None:
    """Return what is wrong with a value's type, by pydantic's strict JSON mode; ranges are checked
    when converted."""
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(hint).validate_json(json.dumps(value, default=lambda date: {}), strict=True)
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Input ")
    return None
