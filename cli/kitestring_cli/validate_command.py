"""`kitestring validate FILE…`."""

import click

from kitestring_api.names import EXIT_OK, EXIT_USER
from kitestring_cli.validate import validate as validate_files


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="[KIND[/NAME]:]PATH=VALUE",
    help="Set a field before the check, e.g. spec.steps=3 or RolloutPool:spec.replicas=2.",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def validate(files: tuple[str, ...], overrides: tuple[str, ...], output: str) -> int:
    """Check files offline, as a cluster would and beyond; `-` is standard input. A mistake ends with exit code 2."""
    validation = validate_files(files, overrides)
    click.echo(validation.as_json() if output == "json" else validation.as_text())
    return EXIT_OK if validation.ok else EXIT_USER
