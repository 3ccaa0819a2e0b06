#!/bin/sh
# build.sh OUT [GOARCH]: the launcher as one static binary at OUT, and launcher.py beside it. The same sources give the
# same bytes. Needs Go and nothing else.
set -eu
[ $# -ge 1 ] || { echo "usage: build.sh OUT [GOARCH]" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mkdir -p "$(dirname "$1")" && cd "$(dirname "$1")" && pwd)
out=$folder/$(basename "$1")
arch=${2:-$(go env GOARCH)}
cd "$here"
CGO_ENABLED=0 GOOS=linux GOARCH=$arch GOFLAGS= GOTOOLCHAIN=local \
  go build -trimpath -buildvcs=false -ldflags "-s -w -buildid=" -o "$out" .
install -m 0644 "$here/../kitestring_rollout/launcher/launcher.py" "$folder/launcher.py"
