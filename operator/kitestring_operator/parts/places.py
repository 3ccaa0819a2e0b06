"""Names of config files, and folders of the pods, that several parts must agree about."""

from __future__ import annotations

COLLECTOR_FILE = "collector.json"
AGENT_COLLECTOR_FILE = "agent-collector.json"
GATEWAY_FILE = "gateway.json"
SIDECAR_FILE = "policy-sidecar.json"
POLICY_SERVER_FILE = "policy-server.json"
TRAINER_FILE = "trainer.json"
FETCH_FILE = "fetch.json"
WORKER_FILE = "worker.json"

RUN_FOLDER = "/kitestring/run"
"""The trainer's own: gone with its pod."""
INPUTS_FOLDER = "/kitestring/inputs"
"""What the trainer reads: models and tasks, fetched or mounted."""
WEIGHTS_FOLDER = "/kitestring/weights"
"""Versions of the weights in a policy server's pod."""
INITIAL_WEIGHTS = f"{WEIGHTS_FOLDER}/initial"
"""The version on which the server starts."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 -- in the pod
"""A container has 64 MiB of it by itself: too little for NCCL and for Ray's object store."""

EVERYWHERE = "0.0.0.0"  # noqa: S104 -- in a pod, behind a NetworkPolicy
LOOPBACK = "127.0.0.1"
