#!/usr/bin/env bash
# Makes .venv with lily_mlx and the named extras, for this machine. Does nothing if that is done already.
#   tools/setup.sh EXTRA[,EXTRA...]
# Takes uv where it is installed, else the newest Python (3.11 or later) on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-}

# MLX comes as one build for each device.
device=
if [ "$(uname -s)" = Linux ]; then
  device=cpu
  if [ "${LILY_MLX_BACKEND:-}" != cpu ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    device=cuda13
  fi
fi
extras=$(printf '%s,%s' "$device" "$extras" | sed 's/^,//; s/,$//')
stamp=".venv/.installed-$(printf '%s' "$extras" | cat - pyproject.toml | cksum | cut -d' ' -f1)"
[ -f "$stamp" ] && exit 0

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local name
  for name in python3.14 python3.13 python3.12 python3.11 python3 python; do
    if command -v "$name" >/dev/null && is_recent "$name"; then
      echo "$name"
      return
    fi
  done
}

if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
  fail "lily_mlx needs a C++ compiler to run its kernels on the CPU." \
    "Install one: 'apt-get install g++' on Debian or Ubuntu, 'xcode-select --install' on macOS."
fi

echo "Setting up .venv ($extras)..." >&2
if command -v uv >/dev/null; then
  [ -x .venv/bin/python ] || uv venv --quiet --python '>=3.11' .venv
  uv pip install --quiet --python .venv/bin/python -e ".[$extras]"
else
  python=$(find_python)
  [ -n "$python" ] || fail "lily_mlx needs Python 3.11 or later, and none is on PATH." \
    "Install Python ('apt-get install python3 python3-venv', or python.org on macOS) or uv."
  if [ ! -x .venv/bin/pip ]; then
    rm -rf .venv
    "$python" -m venv .venv || {
      rm -rf .venv
      fail "Python's venv module is incomplete here." "Install it ('apt-get install python3-venv') or install uv."
    }
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$extras]"
fi

touch "$stamp"
