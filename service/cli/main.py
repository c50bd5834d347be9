"""hallutracer: the commands, and how errors become one readable line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from probes_store.errors import BundleError
from service import __version__
from service.cli import bundle, data, demo, diagnose, evaluate, score, serve, train
from service.errors import HalluTracerError

HELP = (
    "The risk that an LLM's answer is a hallucination, before it decodes the first answer token.\n\n"
    "A probe in every layer reads the last prompt token; the mean over depth becomes a risk.  "
    "Without --model every command uses the embedded demo model."
)

app = typer.Typer(
    name="hallutracer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hallutracer {__version__}")
        raise typer.Exit


@app.callback(help=HELP)
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = (
        False
    ),
) -> None:
    """Root options."""


app.command("serve")(serve.serve)
app.command("score")(score.score)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("diagnose")(diagnose.diagnose)
app.add_typer(bundle.app, name="bundle")
app.add_typer(demo.app, name="demo")
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line; exit 0 done, 1 the work failed, 2 the command line was wrong, 130 interrupted."""
    try:
        app()
    except (HalluTracerError, BundleError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    sys.exit(1)
