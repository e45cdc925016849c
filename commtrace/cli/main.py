"""The ``commtrace`` command: a module of cli/commands for each, imported only when it is called."""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from commtrace import __version__
from commtrace.cli.examples import EXAMPLES
from commtrace.cli.pipes import CLOSED_PIPE, discard_output
from commtrace.errors import CommtraceError
from commtrace.recording.installation import import_pyarrow
from commtrace.trace.inputs import printable, printable_lines

_USER_ERROR: Final = 2
"""Exit status for errors that a user can fix, wrong options among them."""

_HELP: Final = {"help_option_names": ["-h", "--help"]}


class _Command(NamedTuple):
    """A command: the function of its name in its module of ``commtrace.cli.commands``, by default that of its name.

    Where Python has a name, ``_`` is appended to it; a space in it is ``_``.
    """

    summary: str  # here, so that commtrace --help imports no command
    settings: Mapping[str, bool] = {}
    analyses: bool = False  # reads whole runs and starts no program of the user's
    module: str = ""


COMMANDS: Final[Mapping[str, _Command]] = {
    "run": _Command(
        "Run a training command and record it; its script needs no change.",
        {"allow_interspersed_args": False},  # options after the command's name are the command's
    ),
    "summary": _Command("Print where the time of a run went, and what to look at.", analyses=True),
    "report": _Command("Write the timeline and the breakdown of a run as one HTML file.", analyses=True),
    "view": _Command("Show a run in a browser, however large it is.", analyses=True),
    "top": _Command("Show in the terminal where the time of a running job goes.", analyses=True),
    "doctor": _Command("Check the installation, or a run: where it hangs, what it misses.", analyses=True),
    "straggler": _Command("Print which ranks slow the job, why, and what that costs.", analyses=True),
    "pipeline": _Command("Print the pipeline schedule of a run, and why each stage waits.", analyses=True),
    "whatif": _Command("Print what a step of a run would take with changes.", analyses=True),
    "bandwidth": _Command("Print how fast each kind of communication was.", analyses=True),
    "sql": _Command("Query a run with SQL.", analyses=True),
    "list": _Command("List the runs of a directory with their verdicts.", analyses=True, module="history"),
    "hosts": _Command("Print which hosts were named how often over all runs.", analyses=True, module="history"),
    "compare": _Command("Print what changed between two runs; fail if slower.", analyses=True),
    "preflight": _Command("Check a cluster before a job: a verdict for each node."),
    "bench overhead": _Command("Measure what recording costs a training command."),
    "bench collectives": _Command("Measure the bandwidth of collectives, with torchrun."),
    "bench replay": _Command("Issue the communication of a run again, with torchrun."),
    "bench matmul": _Command("Measure what matrix multiplications reach on this device."),
    "trigger": _Command("Record coming steps of a running job in detail, on all ranks."),
    "monitor": _Command("Watch a running job: which ranks are slow, why, what it costs."),
    "metrics": _Command("Export the critical path of a run to Prometheus or OpenTelemetry.", analyses=True),
    "export": _Command("Write a run for the Perfetto UI, or its tables as files.", analyses=True),
    "plot": _Command("Draw a run as SVG, PNG or PDF: timeline, breakdown or heat map.", analyses=True),
    "import": _Command("Make a run from a recording of another program.", analyses=True),
    "merge": _Command("Merge the ranks of one job from several nodes."),
    "plan": _Command("Print what a job will hold and send, before it runs."),
    "search": _Command("Print the layouts in which a model should train fastest.", analyses=True),
    "synth": _Command("Make a run of a simulated job, and the truth about it.", analyses=True),
}


GROUPS: Final[Mapping[str, str]] = {
    "bench": "Measure the cost of recording, the network, the accelerators.",
}
"""Commands whose first word is the same, and what they have in common."""

PURPOSES: Final[Mapping[str, Sequence[str]]] = {
    "Record a job": ("run", "trigger", "import", "merge"),
    "Read a run": (
        "summary", "report", "view", "doctor", "straggler", "pipeline", "bandwidth", "compare", "list", "hosts", "sql",
        "export", "plot", "metrics",
    ),
    "Watch a running job": ("top", "monitor"),
    "Plan and predict": ("whatif", "plan", "search"),
    "Test network, devices and recording": ("preflight", "bench", "synth"),
}  # fmt: skip
"""Commands and groups by what they are for, in the order of the help."""


class _LazyGroup(TyperGroup):
    """Commands that are imported when they are called; ``prefix`` is what their names in COMMANDS begin with."""

    def __init__(self, prefix: str = "", **attributes: Any) -> None:
        super().__init__(**attributes)
        self._prefix = prefix
        for name, command in COMMANDS.items():
            if name.startswith(prefix):
                first, _, rest = name.removeprefix(prefix).partition(" ")
                summary = GROUPS[first] if rest else command.summary
                self.commands[first] = TyperCommand(first, help=summary, context_settings=_HELP)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by what they are for; those of a group are one list."""
        sections = {"Commands": tuple(self.commands)} if self._prefix else PURPOSES
        for title, names in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].help or "") for name in names])

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        name, command, rest = super().resolve_command(context, arguments)
        known = f"{self._prefix}{name}"
        if known in COMMANDS and COMMANDS[known].analyses:
            # Before numpy is imported: OpenBLAS's threads wait for one another on busy cores, which took a hundred
            # times as long as the small clock fit itself.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            import_pyarrow()
        if command is None:
            return name, None, rest
        return name, load_group(known) if known in GROUPS else load_command(known), rest


class _CatchingGroup(_LazyGroup):
    """The whole program: an error of the user is one line."""

    def invoke(self, context: Any) -> object:
        try:
            try:
                return super().invoke(context)
            finally:
                sys.stdout.flush()
        except BrokenPipeError as error:
            discard_output()
            raise typer.Exit(CLOSED_PIPE) from error
        except (CommtraceError, OSError) as error:
            if context.params["traceback"]:
                raise
            typer.echo(f"commtrace: {_message(error)}", err=True)
            raise typer.Exit(_USER_ERROR) from error
        except Exception as error:
            _explain_unknown_option(error)
            raise


def _explain_unknown_option(error: Any) -> None:
    """Add to the message on an unknown option what is missing if it is one of the job's."""
    # by its name: newer versions of typer have click's classes, older ones import click
    if type(error).__name__ == "NoSuchOption" and error.ctx is not None and "-- COMMAND" in error.ctx.get_usage():
        error.message += "\nIf it belongs to the command of a job, write -- before that command."


def _message(error: CommtraceError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return printable(f"{os.fsdecode(error.filename)}: {error.strerror}")
    return printable_lines(str(error))


def command_function(name: str) -> Callable[..., None]:
    """Return the function of a command; its docstring is the help."""
    identifier = f"{name}_" if iskeyword(name) or hasattr(builtins, name) else name.replace(" ", "_")
    module = import_module(f"commtrace.cli.commands.{COMMANDS[name].module or identifier}")
    function: Callable[..., None] = getattr(module, identifier)
    return function


def load_command(name: str) -> TyperCommand:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    epilog = "\b\n" + "\n".join(["Examples:", *(f"  {example}" for example in EXAMPLES[name])])
    function = command_function(name)
    single.command(name, epilog=epilog, context_settings={**_HELP, **COMMANDS[name].settings})(function)
    command = typer.main.get_command(single)
    assert isinstance(command, TyperCommand)
    _name_values(command, function)
    return command


_NUMBERS: Final = ("int", "float")


def _name_values(command: TyperCommand, function: Callable[..., None]) -> None:
    """Let the help call values by what they are, and not by the type that Python gives them."""
    types = get_type_hints(function)
    for parameter in command.params:
        words = str(types.get(parameter.name or ""))
        is_choice = "Literal" in words or "enum" in words.lower() or issubclass(_plain(types, parameter.name), Enum)
        if parameter.param_type_name == "argument":
            argument: Any = parameter
            argument.metavar = argument.metavar or (argument.name or "").upper()
            argument.display_type_rich = _no_type  # newer versions of typer write it behind the name
            argument._usage_display_name = partial(_usage, argument)
        elif parameter.metavar is None and not is_choice and not getattr(parameter, "is_flag", False):
            is_number = any(name in words for name in _NUMBERS)
            parameter.metavar = "PATH" if "Path" in words else "N" if is_number else "TEXT"


def _plain(types: Mapping[str, Any], name: str | None) -> type:
    """Return the class of a value, without that it may be left out; object if it is not just one."""
    hint = types.get(name or "")
    classes = [hint] if isinstance(hint, type) else [one for one in get_args(hint) if isinstance(one, type)]
    given = [one for one in classes if one is not type(None)]
    return given[0] if len(given) == 1 else object


def _no_type(*_: object, **__: object) -> str:
    return ""


def _usage(argument: Any) -> str:
    """Return ``RUN``, ``[RUN]`` if it may be left out, with dots if it may be repeated."""
    name = argument.metavar if argument.required else f"[{argument.metavar}]"
    return f"{name}{'...' * (argument.nargs != 1 and '…' not in name)}"


def load_group(name: str) -> TyperGroup:
    """Return one of the :data:`GROUPS`, with its commands."""
    return _LazyGroup(
        f"{name} ", name=name, help=GROUPS[name], no_args_is_help=True, context_settings=_HELP, rich_markup_mode=None
    )


# Plain help: rich's markup would turn the ":B:" of "A:B:k" into an emoji.
app = typer.Typer(
    cls=_CatchingGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"commtrace {__version__}")
        raise typer.Exit


@app.callback()
def commtrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error was raised.")] = False,
) -> None:
    """Where does the time of a training job go? Record it, and read it from every rank."""


def main() -> None:
    app(prog_name="commtrace")
