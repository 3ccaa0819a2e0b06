"""A stop that comes before a part has its own handlers."""

from __future__ import annotations

import subprocess
import sys

IN_A_CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
STOPPED_WHILE_IT_IMPORTS = """
import os, signal, time
from kitestring_cli import main

def imports(**_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)

main.cli.main = imports
main.main()
"""


def test_the_first_process_of_a_container_hears_a_stop_while_it_imports() -> None:
    """Without default actions, as there, it would be lost, and a pod stay for its whole grace period."""
    done = subprocess.run(
        [*IN_A_CONTAINER, sys.executable, "-c", STOPPED_WHILE_IT_IMPORTS],
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert done.returncode == 128 + 15, done.stderr
