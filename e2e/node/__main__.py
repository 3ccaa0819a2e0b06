"""`e2e/cluster`: the commands."""

from __future__ import annotations

import argparse
import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.node import engine, gpu, kind, kube, kueue, kwok, layout, smoke
from e2e.node.command import Failed
from e2e.node.progress import say


def main() -> int:
    """Carry out one command; 1 and the reason on standard error when a step fails."""
    parser = argparse.ArgumentParser(prog="e2e/cluster", description="the cluster of the end-to-end tests")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="have the cluster; builds whatever is needed and not there")
    commands.add_parser("down", help="delete the cluster and end the engine that was started for it")
    commands.add_parser("status", help="nodes, and where things lie")
    commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    commands.add_parser("env", help='print variables for a shell: eval "$(e2e/cluster env)"')
    load = commands.add_parser("load", help="copy images of the engine into the cluster")
    load.add_argument("images", nargs="+", metavar="IMAGE")
    kueue_command = commands.add_parser("kueue", help="install Kueue, built when needed; or remove it")
    kueue_command.add_argument("action", nargs="?", choices=["install", "remove"], default="install")
    kwok_command = commands.add_parser("kwok", help="start fake nodes (fake-0, …), or stop them")
    kwok_command.add_argument("action", choices=["start", "stop"])
    kwok_command.add_argument("--nodes", type=int, default=1)
    kwok_command.add_argument("--gpus", type=int, default=0, help="of each node")
    gpu_command = commands.add_parser("gpu", help="let the scheduler believe that a node has GPUs")
    gpu_command.add_argument("node")
    gpu_command.add_argument("count", type=int)
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "up":
                with _alone():
                    _up()
            case "down":
                with _alone():
                    _down()
            case "status":
                print(kube.kubectl("get", "nodes", "--output", "wide"), end="")
            case "kubeconfig":
                print(kube.kubeconfig())
            case "env":
                _print_environment()
            case "load":
                kind.load(arguments.images)
            case "kueue":
                kueue.install() if arguments.action == "install" else kueue.remove()
            case "kwok":
                kwok.start(arguments.nodes, arguments.gpus) if arguments.action == "start" else kwok.stop()
            case "gpu":
                gpu.set_capacity(arguments.node, arguments.count)
    except Failed as failure:
        print(f"e2e/cluster: {failure}", file=sys.stderr)
        return 1
    return 0


def _up() -> None:
    if kube.external_kubeconfig() is not None:
        if not kube.reachable():
            named = f"the cluster of KUBECONFIG={kube.kubeconfig()}"
            raise Failed(f"{named} does not answer: start it, or unset KUBECONFIG to have one made")
        say(f"using the cluster of KUBECONFIG={kube.kubeconfig()}")
        return
    engine.start()
    kind.up()
    smoke.check()
    say(f"ready: export KUBECONFIG={kube.kubeconfig()}")


def _down() -> None:
    if kube.external_kubeconfig() is not None:
        say("the cluster of KUBECONFIG is left as it is")
        return
    kwok.end()
    if engine.answers():
        kind.down()
    engine.stop()


def _print_environment() -> None:
    print(f"export KUBECONFIG={kube.kubeconfig()}")
    for name, value in engine.environment().items():
        print(f"export {name}={value}")
    if layout.TOOLS.is_dir():
        print(f'export PATH="{layout.TOOLS}:$PATH"')


@contextmanager
def _alone() -> Iterator[None]:
    """Only one command at a time makes or deletes a cluster."""
    layout.CACHE.mkdir(parents=True, exist_ok=True)
    with (layout.CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another e2e/cluster to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
