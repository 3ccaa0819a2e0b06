"""`kitestring operator`: carry TrainingRuns and RolloutPools out in a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from kitestring_api.names import PORT_OPERATOR


@click.command("operator")
@click.option(
    "--config",
    "config_file",
    required=True,
    type=click.Path(path_type=Path),
    help="YAML file; its fields are in docs/operator.md.",
)
@click.option("--host", default="0.0.0.0", show_default=True, help="Address of probes and metrics.")  # noqa: S104
@click.option("--port", default=PORT_OPERATOR, show_default=True, help="Port of probes and metrics; 0: any.")
def operator(config_file: Path, host: str, port: int) -> int:
    """Carry TrainingRuns and RolloutPools out in a cluster."""
    from kitestring_cli.processes import begin  # noqa: PLC0415
    from kitestring_operator.main import run  # noqa: PLC0415

    begin()
    return run(config_file, host, port)
