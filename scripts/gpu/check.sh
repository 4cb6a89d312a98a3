#!/usr/bin/env bash
# Checks grpo on this machine's GPU in at most 9 minutes, without a network; check.py says how.
#
#   scripts/gpu/check.sh              results in $OUT, or in outputs/gpu-check
#   scripts/gpu/check.sh --dry-run    every stage with tiny shapes on the CPU
#
# Packages that this Python lacks are installed from .gpu-pack (`make gpu-pack`) into a temporary folder.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
site=
if ! "$python" -c 'import datasets, hydra, jsonschema, math_verify' 2>/dev/null; then
  [ -d .gpu-pack ] || { echo "grpo's packages are not installed, and there is no .gpu-pack: run make gpu-pack" >&2; exit 2; }
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" .gpu-pack/*.whl
fi
export PYTHONPATH="$PWD:$PWD/scripts${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
"$python" scripts/gpu/check.py --out "${OUT:-outputs/gpu-check}" "$@"
