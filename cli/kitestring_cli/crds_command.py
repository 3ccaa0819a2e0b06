"""`kitestring crds`."""

import click

from kitestring_api.crd import definitions
from kitestring_cli.generate import manifest_text


@click.command()
def crds() -> None:
    """Print the custom resource definitions, ready for kubectl apply --server-side -f -."""
    click.echo("---\n".join(manifest_text(definition) for definition in definitions().values()), nl=False)
