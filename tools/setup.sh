#!/usr/bin/env bash
# Make .venv with everything that CI uses. Does nothing when pyproject.toml, constraints.txt and this file are unchanged.
#
# PYTHON   the interpreter to start from (3.11 or newer); found by itself otherwise.
# PIP_*    left alone: your index, cache and constraints are used.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "moonrelay set-up: $*"; }
die() { printf '%s\n' "moonrelay set-up: $*" >&2; exit 1; }

# What Mooncake's wheel links to, and the Debian packages that bring it; as in core/moonrelay/cli/checks.py.
libraries="libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4 libstdc++.so.6:libstdc++6"

new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
    if new_enough "$candidate"; then command -v "$candidate"; return; fi
  done
  die "no Python 3.11 or newer found; install one (Debian: apt-get install python3 python3-venv), or set PYTHON"
}

# Install Debian packages when we may; else say exactly what is missing.
debian() {
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    die "missing on this system: $*. Install it and run make again (Debian, Ubuntu: sudo apt-get install -y $*)"
  fi
  say "apt-get install $*"
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >/dev/null; } ||
    die "apt-get could not install: $*"
}

system_libraries() {
  local python=$1 pair missing=()
  for pair in $libraries; do
    "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
  done
  [ ${#missing[@]} -eq 0 ] || debian "${missing[@]}"
}

python=$(find_python)
system_libraries "$python"

stamp=.venv/moonrelay-setup
key=$(cat pyproject.toml constraints.txt tools/setup.sh | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then exit 0; fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "making .venv with $("$python" --version)"
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    debian "python3-venv"
  fi
  "$python" -m venv --clear .venv
fi
say "installing; the first time takes some minutes"
.venv/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0
.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[dev]'
if ! error=$(.venv/bin/python -c 'import mooncake.engine, mooncake.store' 2>&1); then
  die "Mooncake's wheel does not import: $(printf '%s\n' "$error" | tail -1). Try .venv/bin/moonrelay doctor"
fi
printf '%s' "$key" >"$stamp"
say "done: .venv/bin/moonrelay"
