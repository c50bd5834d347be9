"""One declaration per option: flag, variable and configuration key agree, and nothing wrong passes
silently."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from cyclopts import CycloptsError
from cyclopts.argument import Argument

from service.cli.main import main, make_app
from service.options import COMMON, Sources, commands_of, key_of, one_line, options_of
from service.settings import SECRET, ServiceSettings, env

APP = make_app(Sources({}))
COMMANDS = {" ".join(path): arguments for path, arguments in commands_of(APP)}
OPTIONS = [
    (command, argument)
    for command, arguments in COMMANDS.items()
    for argument in options_of(arguments)
    if argument.name not in COMMON
]
# What a command needs besides the option under test.
REQUIRED = {
    "train": "--name n",
    "demo questions": "--split dev",
    "diagnose": "x.npz",
    "score": "why?",
    "bundle show": "demo",
    "bundle find": "demo",
    "bundle verify": "demo",
    "bundle alias": "a b 1",
    "data convert": "helm .",
    "bundle push": "a hf://b/c",
    "bundle sign": "a",
    "bundle pull": "hf://b/c",
    "data forms": "x.jsonl",
    "data audit": "x.csv",
    "keys make": "n",
    "audit verify": "x.jsonl",
    "bundle promote": "a@b",
    "bundle rollback": "a",
}


@pytest.fixture(autouse=True)
def _commands_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "service.options.commands_of",
        lambda app: [(tuple(c.split()), a) for c, a in COMMANDS.items()],
    )


def parsed(*arguments: str, **environment: str) -> Sources:
    sources = Sources(environment, lambda: APP)
    APP.config = (sources,)
    APP.parse_args(arguments, exit_on_error=False, print_error=False)
    return sources


def refused(*arguments: str, **environment: str) -> str:
    with pytest.raises(CycloptsError) as caught:
        parsed(*arguments, **environment)
    return one_line(caught.value)


def kinds(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        yield from kinds(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from kinds(member)
    elif hint is not NoneType:
        yield hint


def example(argument: Argument) -> tuple[Any, list[str]]:
    """A value that is not the default, as TOML has it and as words."""
    kind, *_ = kinds(argument.hint)
    validators: Any = argument.parameter.validator
    limits = validators[0] if validators else None
    if get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Literal:
        choices = list(get_args(get_args(kind)[0]))[:2]
        return choices, choices
    if get_origin(kind) is tuple:
        return ["some", "more"], ["some", "more"]
    if get_origin(kind) is Literal:
        value = next(
            choice for choice in reversed(get_args(kind)) if choice != argument.field_info.default
        )
        return value, [value]
    if kind is bool:
        return not argument.field_info.default, []
    if kind is int:
        number = int(max(17, limits.least))
        return number, [str(number)]
    return (0.25, ["0.25"]) if kind is float else ("none", ["none"])


def flags(argument: Argument, words: list[str]) -> list[str]:
    if argument.field_info.default is True:
        return list(argument.negatives)[:1]
    return [part for word in words for part in (argument.name, word)] or [argument.name]


def test_flag_variable_and_key_give_the_same_value(tmp_path: Path) -> None:
    """Every option of every command at once, each with a value that is not its default."""
    for command in COMMANDS:
        options = [argument for path, argument in OPTIONS if path == command]
        examples = {argument.name: example(argument) for argument in options}
        required = REQUIRED.get(command, "").split()
        base = [*command.split(), *([] if required and required[0] in examples else required)]
        given = [
            word for argument in options for word in flags(argument, examples[argument.name][1])
        ]
        variables = {
            env(argument.name): " ".join(words) or str(value).lower()
            for argument in options
            for value, words in [examples[argument.name]]
        }
        keys = "".join(f"{key_of(a)} = {json.dumps(examples[a.name][0])}\n" for a in options)
        file, table = tmp_path / "config.toml", tmp_path / "table.toml"
        file.write_text(keys)
        table.write_text(f"[{'.'.join(command.split())}]\n{keys}")
        results = [
            parsed(*base, *given).values(),
            parsed(*base, **variables).values(),
            parsed(*base, "--config", str(file)).values(),
            parsed(*base, HALLUTRACER_CONFIG=str(table)).values(),
        ]
        for argument in options:
            values = [result[key_of(argument)] for result in results]
            assert values == [values[0]] * 4, f"{command} {argument.name}"
            assert values[0] != argument.field_info.default
            assert json.loads(json.dumps(values[0], default=str)) == examples[argument.name][0]


def test_every_option_is_explained_and_one_variable_has_one_meaning_in_every_command() -> None:
    meanings: dict[str, set[Any]] = {}
    for command, argument in OPTIONS:
        assert argument.parameter.help, f"{command} {argument.name}"
        secret = argument.name.endswith(("-key", "-password"))
        assert (argument.parameter.metavar == SECRET) == secret, f"{command} {argument.name}"
        declared = (*kinds(argument.hint), argument.parameter.help, argument.parameter.validator)
        meanings.setdefault(env(argument.name), set()).add(declared)
    assert [name for name, ways in meanings.items() if len(ways) > 1] == []
    assert {"HALLUTRACER_JSON", "HALLUTRACER_OUTPUT", "HALLUTRACER_MAX_NEW_TOKENS"} <= set(meanings)


def test_the_precedence_is_flag_environment_table_shared_key_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        "threads = 2\nstore = 'shared'\n[serve]\nthreads = 3\nport = 4\nmax_queue = 5\n"
    )
    base = ("serve", "--config", str(file))
    assert parsed(*base).values()["threads"] == 3
    assert parsed("score", "why?", "--config", str(file)).values()["threads"] == 2
    values = parsed(*base, "--port", "6", HALLUTRACER_PORT="7", HALLUTRACER_MAX_QUEUE="8").values()
    assert (values["port"], values["max_queue"], values["store"]) == (6, 8, "shared")
    assert values["drain_s"] == ServiceSettings.drain_s


def test_a_file_as_windows_editors_write_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(codecs.BOM_UTF8 + b"threads = 2\r\n[serve]\r\nport = 4\r\n")
    values = parsed("serve", "--config", str(file)).values()
    assert (values["threads"], values["port"]) == (2, 4)


def test_names_that_are_both_option_and_table(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[bundle.list]\njson = true\n")
    assert parsed("serve", "--config", str(file)).values()["bundle"] == ()
    assert parsed("bundle", "list", "--config", str(file)).values()["json"] is True
    file.write_text("bundle = ['a']\n")
    assert parsed("serve", "--config", str(file)).values()["bundle"] == ("a",)
    parsed("bundle", "list", "--config", str(file))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", ["prot", "port"]),
        ("[serve]\nprot = 1", ["serve.prot", "port"]),
        ("[serve]\nmax-queue = 1", ["serve.max-queue", "max_queue"]),
        ("[serv]\nport = 1", ["serv", "serve"]),
        ("[train]\nseed = 1", ["train.seed", "seeds"]),
        ("[bundle.list]\nport = 1", ["bundle.list.port"]),
        ("config = 'other.toml'", ["config"]),
        ("[serve]\nport = '9'", ["serve.port", "integer", "'9'"]),
        ("[serve]\nport = true", ["serve.port", "integer"]),
        ("[serve]\nport = 70000", ["serve.port", "0 to 65535", "70000"]),
        ("[serve]\nthreshold = nan", ["serve.threshold", "finite"]),
        ("[serve]\ndrain_s = inf", ["serve.drain_s", "finite"]),
        ("[serve]\ndtype = 'float99'", ["serve.dtype", "float32"]),
        ("[serve]\nprotect_metrics = 1", ["serve.protect_metrics", "boolean"]),
        ("[serve]\nbundle = 'demo'", ["serve.bundle", "array"]),
        ("[serve]\nbundle = [1]", ["serve.bundle", "string"]),
        ("serve = 1", ["serve"]),
        ("port 1", ["not TOML"]),
    ],
)
def test_faults_of_a_file_name_file_key_and_what_is_expected(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "service.toml"
    file.write_text(text)
    message = refused("serve", "--config", str(file))
    assert all(word in message for word in [str(file), *words]), message


def test_a_missing_file_is_an_error_and_a_wrong_type_of_a_secret_is_not_printed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "service.toml"
    assert "cannot read" in refused("serve", "--config", str(file)).lower()
    file.write_text("[serve]\napi_key = 's3cret'")
    assert "s3cret" not in refused("serve", "--config", str(file))
    file.write_text("[serve]\napi_key = ['s3cret']\n[train]\njudge_key = 's3cret'")
    for command in (["serve"], ["train", "--name", "n"]):
        assert "s3cret" not in parsed(*command, "--config", str(file)).effective()


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("PORT", "tcp://10.0.0.7:8765", "int"),
        ("PORT", "-1", "0 to 65535"),
        ("DEADLINE_S", "0", "> 0"),
        ("DRAIN_S", "inf", "finite"),
        ("THRESHOLD", "nan", "finite"),
        ("ENGINE", "jax", "transformers"),
        ("PROTECT_METRICS", "perhaps", "bool"),
        ("API_KEY", "", "empty"),
        ("API_KEY_FILE", "", "empty"),
    ],
)
def test_faults_of_the_environment_name_the_variable(name: str, value: str, word: str) -> None:
    message = refused("serve", **{f"HALLUTRACER_{name}": value})
    assert f"HALLUTRACER_{name}" in message
    assert word in message


def test_an_empty_variable_is_as_good_as_none() -> None:
    values = parsed(
        "serve", HALLUTRACER_MODEL="", HALLUTRACER_BUNDLE="", HALLUTRACER_PORT=""
    ).values()
    assert (values["model"], values["bundle"], values["port"]) == (None, (), ServiceSettings.port)


def test_unknown_variables_are_reported_with_the_nearest_name() -> None:
    warnings = parsed(
        "serve",
        HALLUTRACER_MAX_QUEU="3",
        HALLUTRACER_XYZZY="1",
        HALLUTRACER_FOLDS="5",
        HALLUTRACER_MAX_NEW_TOKENS="9",
        HALLUTRACER_CACHE="/models",
    ).unknown()
    assert len(warnings) == 3  # folds is train's, and the cache is read below all commands
    assert "HALLUTRACER_MAX_COMPLETION_TOKENS" in warnings[0]
    assert "HALLUTRACER_MAX_QUEU " in warnings[1]
    assert "HALLUTRACER_MAX_QUEUE?" in warnings[1]
    assert "HALLUTRACER_XYZZY" in warnings[2]


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("POLCY", "POLICY"),
        ("POLICES", "POLICIES"),
        ("TRESHOLD", "THRESHOLD"),
        ("KEY", "KEYS"),
        ("REQUIRE_SIGNATURES", "REQUIRE_SIGNATURE"),
    ],
)
def test_a_misspelt_variable_leaves_nothing_open(misspelt: str, meant: str) -> None:
    name = f"HALLUTRACER_{misspelt}"
    with pytest.raises(CycloptsError, match=f"^{name} is not read, and HALLUTRACER_{meant} is not"):
        parsed("serve", **{name: "gate"}).unknown()


def test_what_is_set_all_the_same_may_be_misspelt_beside_it() -> None:
    here: dict[str, str] = {"HALLUTRACER_POLICY": "gate"}
    for given, variables in ((("--policy", "gate"), {}), ((), here)):
        assert parsed("serve", *given, HALLUTRACER_POLICYS="x", **variables).unknown()
    assert parsed("train", HALLUTRACER_POLICYS="x").unknown()  # which has no policy
    [warning] = parsed("serve", HALLUTRACER_POLICYS="").unknown()
    assert warning == "HALLUTRACER_POLICYS is not read here; did you mean HALLUTRACER_POLICY?"


def test_print_config_can_be_used_as_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALLUTRACER_MAX_QUEUE", "7")
    monkeypatch.delenv("HALLUTRACER_MODEL")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--port", "1", "--policy", 'a"b', "--print-config"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert "port = 1  # command line" in printed
    assert "max_queue = 7  # HALLUTRACER_MAX_QUEUE" in printed
    file = tmp_path / "again.toml"
    file.write_text(printed)
    monkeypatch.delenv("HALLUTRACER_MAX_QUEUE")
    direct = parsed("serve", "--port", "1", "--policy", 'a"b', HALLUTRACER_MAX_QUEUE="7").values()
    assert parsed("serve", "--config", str(file)).values() == direct | {"config": file}


def test_older_flags_still_work() -> None:
    assert parsed("serve", "--max-new-tokens", "9").values()["max_completion_tokens"] == 9
    assert parsed("diagnose", "x.npz", "--json", "out.json").values()["output"] == Path("out.json")
    assert parsed("demo", "build", "--seeds", "3").values()["model_seeds"] == 3
