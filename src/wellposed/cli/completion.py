"""`wellposed completion`: the script by which a shell completes our commands."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell, e.g. for eval "$(wellposed completion bash)"."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"no completion for {shell}")
    click.echo(kind(context.find_root().command, {}, "wellposed", "_WELLPOSED_COMPLETE").source())
