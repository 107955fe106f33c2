#!/usr/bin/env bash
# Tests as an ordinary user meets them: no rights, no home, nothing writable but a temporary folder,
# umask 077, LANG=C, and a checkout whose path has a space and an umlaut.
#
#     tools/test_as_stranger.sh [tests and options of pytest]
#
# Uses the packages of .venv, so nothing is installed. Needs root, to become another user.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/support tests/cli/test_stranger.py tests/training/test_resume.py)
if [ "$(id -u)" != 0 ] || ! command -v setpriv >/dev/null; then
  echo "test_as_stranger: only root can become another user, with setpriv; nothing was tested" >&2
  exit 0
fi
# env finds the interpreter as the other user; setpriv itself would still find it as root
as_stranger() { setpriv --reuid=nobody --regid=nogroup --clear-groups env "$@"; }
# the interpreter of .venv may be in a home that others cannot enter: then one of the same version
version=$("$root/.venv/bin/python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
for python in "$root/.venv/bin/python" "/usr/bin/$version" "/usr/local/bin/$version"; do
  as_stranger "$python" -c pass 2>/dev/null && break
  python=
done
if [ -z "$python" ]; then
  echo "test_as_stranger: there is no $version that another user may run" >&2
  exit 1
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
checkout="$place/prüf stand/primal"
mkdir -p "$checkout" "$place/tmp"
git -C "$root" archive --format=tar HEAD | tar -x -C "$checkout"
chown -R nobody "$place"
chmod 700 "$place"
cd "$checkout"
umask 077
packages=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
as_stranger -u PRIMAL_DATA HOME=/nonexistent LANG=C LC_ALL=C TMPDIR="$place/tmp" \
  PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$checkout/src:$checkout/studies/src:$packages" \
  "$python" -m pytest -q -p no:cacheprovider -m "not slow" "${tests[@]}"
