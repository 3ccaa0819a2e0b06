"""Stands in for `vllm.entrypoints.openai.api_server` on machines without a GPU.

Takes vLLM's arguments, and has our policy server for CPUs serve. It shows where pods of vLLM go, and nothing of vLLM.
"""

import argparse
from pathlib import Path

from kitestring_trainer.policy_server import PolicyServerConfig, run

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--model", type=Path, required=True)
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--max-model-len", type=int)
parser.add_argument("--logprobs-mode", required=True)
parser.add_argument("--generation-config", required=True)
parser.add_argument("--enable-prefix-caching", action="store_true")
parser.add_argument("--enable-prompt-tokens-details", action="store_true")
given = parser.parse_args()
run(
    PolicyServerConfig(
        model=given.model,
        served_model_name=given.served_model_name,
        host=given.host,
        port=given.port,
        seed=given.seed,
        max_model_len=given.max_model_len,
        weights_root=given.model.parent,
    )
)
