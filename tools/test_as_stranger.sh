#!/usr/bin/env bash
# `make test` as an ordinary user meets it: no rights, no home, umask 077, LANG=C, and a checkout
# whose path has a space and an umlaut. Needs root, to become another user.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
checkout="$place/prüf stand/primal"
mkdir -p "$checkout" "$place/tmp"
git -C "$root" archive --format=tar HEAD | tar -x -C "$checkout"
chown -R nobody "$place"
chmod 700 "$place"
cd "$checkout"
umask 077
# HOME is a folder that does not exist and cannot be made; what the machine sets for pip stays
exec_as() { setpriv --reuid=nobody --regid=nogroup --clear-groups "$@"; }
exec_as env HOME=/nonexistent LANG=C LC_ALL=C TMPDIR="$place/tmp" PIP_NO_CACHE_DIR=1 \
  PYTHONDONTWRITEBYTECODE=1 make "${1:-test}" PYTHON="${PYTHON:-python3}"
