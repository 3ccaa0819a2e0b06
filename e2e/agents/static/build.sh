#!/bin/sh
# build.sh IMAGE: the image of one static program and nothing else. Needs Go and a Docker engine.
set -eu
[ $# -eq 1 ] || { echo "usage: build.sh IMAGE" >&2; exit 2; }
cd "$(dirname "$0")"
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
CGO_ENABLED=0 GOOS=linux GOFLAGS= GOTOOLCHAIN=local go build -trimpath -buildvcs=false -ldflags "-s -w" -o "$context/agent" .
# Nothing in the file needs BuildKit: an engine without its plug-in builds it as well.
docker buildx version >/dev/null 2>&1 || export DOCKER_BUILDKIT=0
docker build --quiet --file Dockerfile --tag "$1" "$context" >/dev/null
