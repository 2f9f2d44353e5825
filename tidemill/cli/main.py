"""`tidemill`: the commands, and errors as one or two lines."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from tidemill.cli import (
    batch,
    bench,
    calibrate,
    calibrate_kv,
    chat,
    completion,
    convert,
    distill,
    evaluate,
    explain,
    generate,
    memory,
    models,
    ollama,
    plan,
    plan_layout,
    prompt_cache,
    prune,
    quantize,
    route,
    serve,
    simulate,
    train_draft,
    train_predictors,
    worker,
)
from tidemill.cli.foreign import Command
from tidemill.cli.settings import EPILOG
from tidemill.errors import TidemillError
from tidemill.version import __version__

app = typer.Typer(
    name="tidemill",
    help="Run and serve language models on this machine. Start with: tidemill serve",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,  # API keys are among them
)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"tidemill {__version__}")
        raise typer.Exit


app.command(epilog=EPILOG, cls=Command)(serve.serve)
app.command(epilog=EPILOG, cls=Command)(route.route)
app.command(epilog=EPILOG, cls=Command)(chat.chat)
app.command(epilog=EPILOG, cls=Command)(generate.generate)
app.command(epilog=EPILOG, cls=Command)(batch.batch)
app.command(cls=Command)(ollama.pull)
app.command(cls=Command)(worker.worker)
app.command(cls=Command)(models.models)
app.command(epilog=EPILOG, cls=Command)(memory.memory)
app.command(cls=Command)(plan.plan)
app.command("plan-layout", cls=Command)(plan_layout.plan_layout)
app.command(cls=Command)(explain.explain)
app.command(epilog=EPILOG, cls=Command)(calibrate.calibrate)
app.command(epilog=EPILOG, cls=Command)(simulate.simulate)
app.command("calibrate-kv", epilog=EPILOG, cls=Command)(calibrate_kv.calibrate_kv)
app.command(epilog=EPILOG, cls=Command)(quantize.quantize)
app.command("train-draft", epilog=EPILOG, cls=Command)(train_draft.train_draft)
app.command(epilog=EPILOG, cls=Command)(evaluate.evaluate)
app.command(cls=Command)(prune.prune)
app.command("train-predictors", epilog=EPILOG, cls=Command)(train_predictors.train_predictors)
app.command(cls=Command)(distill.distill)
app.command(cls=Command)(convert.convert)
app.add_typer(bench.app, name="bench")
app.add_typer(prompt_cache.app, name="prompt-cache")
app.command(cls=Command)(completion.completion)
app.command("run", hidden=True, epilog=EPILOG, cls=Command)(chat.chat)
for name in ("list", "ls", "show"):
    app.command(name, hidden=True, cls=Command)(models.models)
ollama.add_hints(app)


def main() -> None:
    completion.answer_shell()
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except TidemillError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("error:", style="bold red", end=" ")
        console.print(error.message, markup=False)
        if error.fix:
            console.print(error.fix, markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
