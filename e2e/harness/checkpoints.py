"""The checkpoint that a run's status names, as a user takes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from e2e.harness.api import Object
from e2e.node import layout
from kitestring_operator.identity import run_id
from kitestring_rollout.storage import ObjectStore
from kitestring_rollout.storage.manifest import fetch_folder


def assert_usable(store: ObjectStore, run: Object, folder: Path) -> None:
    """It is that of the run's last step, and an ordinary Hugging Face folder, which `folder` then is."""
    identity, step = run_id(run["metadata"]["name"], run["metadata"]["uid"]), run["status"]["step"]
    checkpoint = run["status"]["checkpoint"]
    assert re.fullmatch(rf"s3://[^/]+/{identity}/checkpoints/step-{step:06d}/", checkpoint), checkpoint
    fetch_folder(store, checkpoint.split("/", 3)[3], folder)
    load = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    subprocess.run([str(layout.VENV / "bin" / "python"), "-c", load, str(folder)], check=True, timeout=120)
