#!/usr/bin/env bash
# What only a GPU can show of the time budget. Usage: gpu_budget.sh [profiler] [overhead] [ranks] [ceiling]
set -u
cd "$(dirname "$0")/../.."
case "${*:-all}" in *all*) set -- profiler overhead ranks ceiling ;; esac
photos=${PHOTOS:-/tmp/photos}
part() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }
for what; do
  case $what in
    profiler)
      part "exposed starvation beside torch.profiler's idle time, the same steps"
      python3 tests/bench/profiler_truth.py
      ;;
    overhead)
      part "steps/s with everything on, against off"
      python3 tests/bench/overhead_blocks.py --device cuda --model resnet50 --starts 2 --seconds 0.6 --pairs 20
      python3 tests/bench/overhead_blocks.py --device cuda --step-ms 2 --starts 4
      ;;
    ranks)
      part "two gloo ranks share the GPU, a slow loader on one"
      DEVICE=cuda python3 tests/bench/plants.py --ranks 2 --plants loader --runs 4
      ;;
    ceiling)
      [ -d "$photos" ] || python3 -c "
from pathlib import Path
from feedtune.workloads.demo_data import make_photos
if __name__ == '__main__':
    make_photos(Path('$photos'), 8000)"
      part "the ceiling beside the script edited by hand"
      python3 tests/bench/ceiling_truth.py --blocks 8 --data "$photos" --model resnet50 --batch-size 128 --amp \
        --channels-last --num-workers 12
      ;;
    *) echo "what is $what?" >&2; exit 2 ;;
  esac
done
part "done; what is left over:"
pgrep -fa 'feedtune|profiled_training|planted' || echo nothing
