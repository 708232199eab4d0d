#!/usr/bin/env bash
# Everything that needs a GPU, in one call: tune ResNet-50 on one GPU, then the same under NCCL on all of them.
set -u
out=${1:-.}
python3 - <<'P'
import torch, os
print(torch.__version__, torch.cuda.device_count(), torch.cuda.get_device_name(0), os.cpu_count())
P
cat > /tmp/photos.py <<'P'
from pathlib import Path
from feedtune.workloads.demo_data import make_photos
if __name__ == "__main__":
    make_photos(Path("/tmp/photos"), 48000)
P
[ -d /tmp/photos ] || python3 /tmp/photos.py
export TUNE="--budget 150 --max-workers 32"
common="--data /tmp/photos --model resnet50 --batch-size 128 --amp --channels-last --num-workers 4"
[ -n "${ONLY_MULTI:-}" ] || { echo "== one process, ResNet-50"; python3 tests/bench/tune_truth.py vision $common; }
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 1 ]; then
  echo "== $gpus ranks, NCCL"; python3 tests/bench/tune_truth.py vision $common --nproc "$gpus"
fi
pgrep -fa workloads.vision && echo "LEFT OVER PROCESSES"
ls /dev/shm
