#!/usr/bin/env bash
# Build Kitestring's images. Usage: images/build.sh [NAME…] [--base-image IMAGE] [--prefix PREFIX] [--tag TAG]
# or make images IMAGES="[NAME…] …", which brings the uv that is needed. Needs Docker, and Go 1.24 for rollout.
#   NAME          operator, rollout, trainer, trainer-gpu, policy-server-cpu, calculator-agent; none: all but trainer-gpu
#   --base-image  Debian or a relative with Python 3.11, in place of the default in each Dockerfile
#   --prefix      beginning of the images' names (kitestring/)
#   --tag         their tag (the version of the chart's application)
# Python packages are installed on this machine, by the hashed locks, into the context of each build. So a build needs no
# network, no compiler and no credentials, packages come from the cache of uv, and no image holds an installer.
# Environment: UV, the uv to use; TORCH=cpu takes torch from uv's CPU backend in place of the locked CUDA build.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'images/build.sh: %s\n' "$*" >&2; exit 2; }

known=(operator rollout trainer trainer-gpu policy-server-cpu calculator-agent)
names=() base_image="" prefix=kitestring/ tag=$(sed -n 's/^appVersion: *//p' charts/kitestring/Chart.yaml)
while [ $# -gt 0 ]; do
  case $1 in
    --base-image | --prefix | --tag)
      [ $# -gt 1 ] || fail "$1: found nothing after it; give a value"
      case $1 in --base-image) base_image=$2 ;; --prefix) prefix=$2 ;; --tag) tag=$2 ;; esac
      shift 2
      ;;
    -h | --help) sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//;p;}' "$0"; exit 0 ;;
    -*) fail "$1: no such option (--base-image, --prefix, --tag)" ;;
    *)
      case " ${known[*]} " in *" $1 "*) names+=("$1") ;; *) fail "$1: no such image (${known[*]})" ;; esac
      shift
      ;;
  esac
done
[ ${#names[@]} -gt 0 ] || names=(operator rollout trainer policy-server-cpu calculator-agent)

[[ " ${names[*]} " != *" rollout "* ]] || command -v go >/dev/null ||
  fail "go not found: the launcher in the image rollout is compiled; install Go 1.24 or later, or name the other images"
uv=${UV:-.venv/bin/uv}
command -v "$uv" >/dev/null || fail "$uv not found: run make images IMAGES=\"…\", which brings it, or name one, UV=… images/build.sh"
docker version --format '{{.Server.Version}}' >/dev/null || fail "no Docker engine answers"
# Nothing in the files needs BuildKit: an engine without its plug-in builds them as well.
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0
machine=$(uname -m)
platform=${machine/arm64/aarch64}-manylinux_2_28

mkdir -p build
stages=$(mktemp -d build/images-XXXXXX)
trap 'rm -rf "$stages"' EXIT
wheel=""

install() { # install ARGUMENTS…: into the site-packages of the image that is being prepared
  "$uv" pip install --quiet --target "$stage/site-packages" --python-version 3.11 --python-platform "$platform" "$@"
}
locked() { # locked LOCK…: what a lock names, by its hashes
  local lock
  for lock in "$@"; do install --require-hashes --no-deps -r "locks/$lock"; done
}
torch() {
  if [ "${TORCH:-locked}" = cpu ]; then install --torch-backend cpu -r locks/torch.in; else locked torch.txt; fi
}
kitestring() { # our own packages, and the command
  if [ -z "$wheel" ]; then
    "$uv" build --quiet --wheel --out-dir "$stages/wheel" .
    wheel=$(echo "$stages"/wheel/kitestring-*.whl)
  fi
  install --no-deps "$wheel"
}
commands() { # commands NAME…: those of the packages' commands that the image has; they run under its interpreter
  mkdir "$stage/bin"
  local command
  for command in "$@"; do mv "$stage/site-packages/bin/$command" "$stage/bin/"; done
  rm -r "$stage/site-packages/bin"
  [ $# -gt 0 ] || return 0
  sed -i.orig '1s|^#!.*python.*$|#!/opt/kitestring/bin/python|' "$stage"/bin/*
  rm "$stage"/bin/*.orig
}
quickstart() { # the calculator example, without what it has made on this machine
  mkdir -p "$stage/calculator/policy"
  cp examples/calculator/*.py examples/calculator/trainingrun.yaml "$stage/calculator"
  cp examples/calculator/policy/*.py "$stage/calculator/policy"
}

prepare() { # prepare NAME: the context of its build
  case $1 in
    operator) locked operator.txt && kitestring && commands kitestring ;;
    rollout)
      locked rollout.txt && kitestring && commands kitestring
      rollout/launcher/build.sh "$stage/launcher"
      ;;
    trainer) torch && locked trainer.txt && kitestring && commands kitestring ray && quickstart ;;
    trainer-gpu) locked gpu.txt && kitestring && commands kitestring ray && quickstart ;;
    policy-server-cpu) torch && locked policy-server.txt && kitestring && commands kitestring ;;
    calculator-agent) locked calculator-agent.txt && commands && cp examples/calculator/agent.py "$stage/agent.py" ;;
  esac
}

packages() { # packages NAME: what runs in it, which must find everything that it imports
  case $1 in
    operator) echo kitestring_operator kitestring_cli.operator_command ;;
    rollout) echo kitestring_rollout kitestring_cli.processes ;;
    trainer | trainer-gpu) echo kitestring_trainer kitestring_cli ;;
    policy-server-cpu) echo kitestring_trainer.policy_server kitestring_cli.processes ;;
    calculator-agent) echo openai.resources.chat ;;
  esac
}

for name in "${names[@]}"; do
  start=$SECONDS image=$prefix$name:$tag stage=$stages/$name
  mkdir "$stage"
  prepare "$name"
  prepared=$SECONDS
  arguments=()
  [ -z "$base_image" ] || arguments+=(--build-arg "BASE_IMAGE=$base_image")
  # Triton compiles with a C compiler, which the slim base lacks.
  [ "$name" != trainer-gpu ] || [ -n "$base_image" ] || arguments+=(--build-arg BASE_IMAGE=python:3.11.14-bookworm)
  docker build --quiet --file "images/${name%-gpu}/Dockerfile" "${arguments[@]}" --tag "$image" "$stage" >/dev/null
  rm -rf "$stage"
  # shellcheck disable=SC2046 -- several words
  docker run --rm --interactive --network none --read-only --tmpfs /tmp --entrypoint python "$image" \
    - $(packages "$name") < images/imports.py
  bytes=$(docker image inspect --format '{{.Size}}' "$image")
  printf '%s: %d MB, prepared in %d s, built in %d s\n' "$image" $((bytes / 1000000)) $((prepared - start)) $((SECONDS - prepared))
done
