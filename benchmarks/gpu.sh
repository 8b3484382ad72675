#!/usr/bin/env bash
# Everything that needs one NVIDIA GPU: the tests marked gpu, then the step times. Under 8 minutes.
# Not yet run on a GPU.
#   OUT=/some/folder PYTHON=.venv/bin/python benchmarks/gpu.sh
# Rows go to $OUT where it is set, else to results/. The tests' failure does not stop the timings; it is the exit status.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || exit 1
"$python" -c "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda)" || exit 1
timeout 240 "$python" -m pytest -m gpu -rfE tests/precision tests/kernels
tests=$?
timeout 220 "$python" benchmarks/gpu.py
timings=$?
exit $((tests != 0 ? tests : timings))
