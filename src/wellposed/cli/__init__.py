"""The `wellposed` command: results go to stdout, progress to stderr.

A command is imported when it is used, so that help, completion and `wellposed verify` start without torch.
"""

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from wellposed.errors import WellposedError, require_all, unknown_name

GROUP = "wellposed.commands"  # of entry points, by which other packages add commands

# Where the commands of the library are, and the first sentence of their help.
COMMANDS = {
    "attack": ("wellposed.cli.attack:attack", "Look for inputs that change what a model says, and draw them."),
    "certify": (
        "wellposed.cli.certify:certify",
        "Prove which samples keep their class on a box, and attack the rest.",
    ),
    "completion": (
        "wellposed.cli.completion:completion",
        'Print the completion script of a shell, e.g. for eval "$(wellposed completion bash)".',
    ),
    "convert": ("wellposed.cli.convert:convert", "Write a network as an implicit form."),
    "demo": ("wellposed.cli.demo:demo", "Train a reader of digits and ask it six questions, in under a minute."),
    "export": (
        "wellposed.cli.export:export",
        "Write a model as an ONNX file, with so many steps for every solve.",
    ),
    "show": ("wellposed.cli.convert:show", "Describe a form: blocks, sizes, loops and certificate, and draw it."),
    "sparsify": (
        "wellposed.cli.sparsify:sparsify",
        "Fit a sparse implicit model with a certificate to a trained network.",
    ),
    "verify": ("wellposed.cli.verify:verify", "Prove what a certificate says of a saved model."),
}

Options = Mapping[str, Any]  # of a command, by the names of its parameters


class Need(NamedTuple):
    """Optional packages of a command, by the extra that brings them, and the options that call for them."""

    extra: str
    packages: tuple[str, ...]
    when: Callable[[Options], bool] = lambda options: True


def _ends(options: Options, *names: str, still: bool) -> bool:
    """Returns whether one of these files is a still picture, or a page."""
    paths = [Path(options[name]) for name in names if options.get(name) is not None]
    return any((path.suffix.lower() != ".html") == still for path in paths)


# What commands need besides the core, so that all that is missing is told at once and before any work.
NEEDS = {
    "attack": (
        Need("robust", ("highspy",), lambda options: options["kind"] == "lp"),
        Need("robust", ("pyautoattack",), lambda options: options["kind"] == "autoattack"),
        Need("plots", ("matplotlib",), lambda options: _ends(options, "out", still=True)),
    ),
    "certify": (
        Need(
            "robust",
            ("highspy",),
            lambda options: options["method"] in ("lp", "triangle") or options["complete"],
        ),
        Need("share", ("onnx",), lambda options: str(options["network"] or options["model"]).endswith(".onnx")),
    ),
    "export": (Need("share", ("onnx", "onnxscript")),),
    "show": (
        Need("plots", ("matplotlib",), lambda options: _ends(options, "picture", "diagram", still=True)),
        Need("plots", ("plotly",), lambda options: _ends(options, "picture", "diagram", still=False)),
    ),
    "sparsify": (
        Need("convex", ("numba",), lambda options: options["solver"] in ("homotopy", "refined")),
        Need("convex", ("clarabel", "scipy"), lambda options: options["solver"] == "conic"),
        Need(
            "convex", ("cvxpy",), lambda options: options["solver"] == "cvxpy" or options["objective"] == "robust"
        ),
        Need("convex", ("joblib",), lambda options: options["jobs"] > 1),
    ),
}

# The commands that the lab adds where it is installed: known here so that help need not import it.
LAB_COMMANDS = {
    "list": "List the suites of experiments and what they reproduce.",
    "report": "Write one page with plots, our numbers beside the published ones, and verdicts.",
    "resume": "Go on with everything in a results folder that is not finished.",
    "run": "Run suites; what is finished is skipped, what was interrupted goes on.",
    "status": "Show how far the runs of a results folder are.",
}


def added_commands() -> dict[str, EntryPoint]:
    """Returns the commands of other packages by name; those of the library cannot be replaced."""
    points = {point.name: point for point in entry_points(group=GROUP) if point.name not in COMMANDS}
    return dict(sorted(points.items()))


def command_helps() -> dict[str, str]:
    """Returns the help of every command, in the order of the listing; an unknown one's says where it is from."""
    added = {name: LAB_COMMANDS.get(name) or _origin(point) for name, point in added_commands().items()}
    return {name: text for name, (_, text) in COMMANDS.items()} | added


class LazyGroup(click.Group):
    """Imports a command when it is used, and names the nearest one when a name is mistyped."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Lists the commands of the library, then those of other packages."""
        return list(command_helps())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command; None if there is none of that name."""
        if cmd_name in COMMANDS:
            return _checked(cmd_name, EntryPoint(cmd_name, COMMANDS[cmd_name][0], GROUP).load())
        point = added_commands().get(cmd_name)
        return None if point is None else _load(point)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command, or says which ones there are."""
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            if name in LAB_COMMANDS:
                raise click.ClickException(
                    f"{name!r} is a command of the lab, which is not installed; in a checkout of wellposed run: "
                    "pip install ./lab (or make lab)"
                )
            ctx.fail(str(unknown_name("command", name, names)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a line a command, and imports none."""
        helps = command_helps()
        sections: dict[str, list[str]] = {}
        for name in helps:
            library, lab = name in COMMANDS, name in LAB_COMMANDS
            title = "Commands" if library else "Lab commands" if lab else "Commands of other packages"
            sections.setdefault(title, []).append(name)
        widest = max(map(len, helps))
        for title, names in sections.items():
            with formatter.section(title):
                room = formatter.width - 6 - widest
                formatter.write_dl([(name.ljust(widest), short_help(helps[name], room)) for name in names])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offers the commands and options that begin like this, and imports none."""
        helps = {name: text for name, text in command_helps().items() if name.startswith(incomplete)}
        commands = [CompletionItem(name, help=short_help(text)) for name, text in helps.items()]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]


def short_help(text: str, room: int = 45) -> str:
    """Shortens the help of a command as click does."""
    return click.Command(None, help=text).get_short_help_str(room)


def _checked(name: str, command: click.Command) -> click.Command:
    """Returns a command that first checks that the packages its options need are installed."""
    work = command.callback
    if name not in NEEDS or work is None:
        return command

    @functools.wraps(work)
    def first_look(**options: Any) -> Any:
        wanted = [(package, need.extra) for need in NEEDS[name] if need.when(options)
                  for package in need.packages]  # fmt: skip
        require_all([*wanted, *_for_data(name, options)])
        return work(**options)

    wrapped = copy.copy(command)
    wrapped.callback = first_look
    return wrapped


def _for_data(name: str, options: Options) -> list[tuple[str, str]]:
    """Lists the packages needed to fetch the named data sets that are not here."""
    if options.get("data") is None:
        return []
    data_packages = EntryPoint("data", "wellposed.cli.inputs:data_packages", GROUP).load()
    splits = ("train", "test") if name == "sparsify" else ("test",)
    return [(package, "data") for package in data_packages(options["data"], splits)]


def _origin(point: EntryPoint) -> str:
    return f"From the package {point.dist.name if point.dist else point.module}."


def _load(point: EntryPoint) -> click.Command:
    """Imports a command of another package, or says in one line why that fails."""
    try:
        command = point.load()
    except WellposedError:
        raise
    except (ImportError, AttributeError) as error:
        raise click.ClickException(
            f"the command {point.name!r} ({point.value}) cannot be loaded: {error}"
        ) from error
    if not isinstance(command, click.Command):
        raise click.ClickException(
            f"the command {point.name!r} ({point.value}) is a {type(command).__name__}, not a click command"
        )
    return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(sys.modules["wellposed"].__version__, prog_name="wellposed", message="%(prog)s %(version)s")
def cli() -> None:
    """Implicit deep learning: x = f(x, u) is the model."""


def main() -> None:
    """Runs the command; Ctrl-C ends it with one line and the exit code 130."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except WellposedError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # a name that is too long, a folder that may not be entered, a full disk
        click.echo(f"Error: {str(error)[:500]}", err=True)
        sys.exit(1)
