#!/usr/bin/env bash
# Whether feedtune works with other Pythons and torches than CI's pair.
#
# Usage: bash tests/matrix.sh PYTHON...
#
# A PYTHON that has torch, feedtune's dependencies, pytest and jsonschema tunes, watches and applies each kind
# of training. One without torch gets feedtune in an environment of its own: the tests that need no torch are
# run, and a training of the interpreter TRAIN (python3), which has one, is tuned, watched and applied.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
train="${TRAIN:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
torchless=(contract unit/analysis unit/beside unit/feedtune unit/launch unit/trials unit/shard_tools)

with_torch() {
  cd "$root" && "$1" -m pytest -q -p no:cacheprovider -m 'slow or not slow' \
    tests/integration/test_kinds.py tests/integration/test_run_apply.py tests/integration/test_run_loops.py
}

without_torch() {
  local place="$work/$2" script=tests/integration/scripts/latency.py
  mkdir "$place"
  cp -r "$root"/{feedtune,shard_tools,tests,configs,pyproject.toml,README.md,LICENSE} "$place"
  cd "$place"
  "$1" -m venv .venv
  .venv/bin/pip install -q . 'pytest>=8' 'jsonschema>=4'
  .venv/bin/python -m pytest -q -p no:cacheprovider --ignore tests/unit/shard_tools/test_read.py \
    "${torchless[@]/#/tests/}"
  .venv/bin/feedtune tune --out run --set num_workers=4 -- "$train" "$script"
  STEPS=60 .venv/bin/feedtune run --out watched -- "$train" "$script"
  STEPS=60 .venv/bin/feedtune apply run -- "$train" "$script"
}

outcome=0
for python in "$@"; do
  version="$("$python" -c 'import sys; print(".".join(map(str, sys.version_info[:3])))')"
  if torch="$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)"; then
    name="Python $version, torch $torch" way=with_torch
  else
    name="Python $version without torch, training by $("$train" --version)" way=without_torch
  fi
  # Not in a condition, where bash would not stop at a command that fails.
  set +e
  (set -e; "$way" "$python" "$version")
  code=$?
  set -e
  if [ "$code" -eq 0 ]; then echo "== $name: passed"; else echo "== $name: FAILED"; outcome=1; fi
done
exit "$outcome"
