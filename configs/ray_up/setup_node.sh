#!/usr/bin/env bash
# Installs the software of one node into ~/dspark/env, from the wheel and the constraints that the launcher copied beside this
# script. Instant when that very wheel is installed already; an environment that somebody else put there is left alone.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
env=$HOME/dspark/env
stamp=$env/.installed-by-setup-node
if [ -x "$env/bin/dspark" ] && [ ! -f "$stamp" ]; then
  echo "setup: $env was there before, it is used as it is"
  exit 0
fi
wheels=("$here"/*.whl)
[ -f "${wheels[0]}" ] || { echo "setup: no wheel beside $here/setup_node.sh; run 'make dist' where you call the launcher" >&2; exit 1; }
wanted=$(cat "${wheels[0]}" "$here/constraints.txt" | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  echo "setup: nothing to do"
  exit 0
fi
python=""
for candidate in python3.13 python3.12 python3.11 python3; do
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))'; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || { echo "setup: Python 3.11 or newer with venv is needed here" >&2; exit 1; }
rm -f "$stamp"
[ -x "$env/bin/pip" ] || "$python" -m venv "$env"
pip="$env/bin/pip --disable-pip-version-check -q"
# torch goes first and alone, as in the Makefile; a GPU node gets the build for its CUDA from the index its administrator set.
$pip install "$(grep '^torch==' "$here/constraints.txt")"
$pip install -c "$here/constraints.txt" "${wheels[0]}"
# The same version may be another wheel.
$pip install --no-deps --force-reinstall "${wheels[0]}"
printf '%s' "$wanted" > "$stamp"
echo "setup: installed $("$env/bin/dspark" version --json)"
