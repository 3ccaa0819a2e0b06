"""The `kitestring` command. Each subcommand is imported when it is called, so that `kitestring --help` stays quick."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import click

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "run": ("kitestring_cli.run.command:run", "Train on this machine from the files that kubectl apply takes."),
    "try": ("kitestring_cli.try_rollout.command:try_rollout", "Run one rollout of an agent, without a trainer."),
    "validate": ("kitestring_cli.validate_command:validate", "Check files offline."),
    "inspect": ("kitestring_cli.inspection.command:inspect_run", "Say how a run went."),
    "show": ("kitestring_cli.show.command:show", "Print a rollout: the conversation with its rewards."),
    "export": ("kitestring_cli.export.command:export", "Write the transitions or messages of a run to a file."),
    "crds": ("kitestring_cli.crds_command:crds", "Print the custom resource definitions."),
    "collector": ("kitestring_cli.processes:collector", "Part: OTLP in, object storage out."),
    "gateway": ("kitestring_cli.processes:gateway", "Part: between agents and models."),
    "policy-server": ("kitestring_cli.processes:policy_server", "Part: serve a policy on CPU."),
    "policy-sidecar": ("kitestring_cli.processes:policy_sidecar", "Part: before a policy server, in its pod."),
    "worker": ("kitestring_cli.processes:worker", "Part: lease rollouts and run agents."),
    "scorer": ("kitestring_cli.processes:scorer", "Part: a scorer container as a process (local runs)."),
    "fetch": ("kitestring_cli.processes:fetch", "Part: bring a trainer's inputs into folders."),
    "trainer": ("kitestring_cli.processes:trainer", "Part: rollout queue and training."),
    "operator": ("kitestring_cli.operator_command:operator", "Carry runs out in a cluster."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called; the list needs no import."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kitestring")
def cli() -> None:
    """Train any agent with reinforcement learning, without changing the agent."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: `names.EXIT_*`. A user's mistake prints one message, a bug its traceback."""
    if os.getpid() == 1:
        # The first process of a container has no default actions. A SIGTERM before a part listens for it, whose imports
        # take a second, would be lost, and a worker's pod would stay for as long as its rollouts may take.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        result = cli.main(args=arguments, prog_name="kitestring", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USER)
    except UserMistakeError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_USER)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # the reader of our output went away (kitestring export | head): no failure of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    sys.exit(result if isinstance(result, int) else 0)
