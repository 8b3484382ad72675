#!/usr/bin/env bash
# Everything that needs one NVIDIA GPU: the tests marked gpu, step times, sizes from 1M to 1B parameters, exactness and
# its cost, fp8 products, rollout speed, the demo's recipe in native fp16 and bf16. Each part has a limit of its own;
# together about 13 minutes where all goes well.
#   OUT=/some/folder PYTHON=.venv/bin/python benchmarks/gpu.sh
# Rows go to $OUT where it is set, else to results/. A part that fails does not stop the next; the exit status says so.
set -uo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
results="${OUT:-results}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || exit 1
"$python" -c "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda)" || exit 1

failed=0
part() {  # part SECONDS COMMAND...
    local limit="$1" start=$SECONDS
    shift
    echo "== $*"
    timeout "$limit" "$@" || { echo "   failed with status $?"; failed=1; }
    echo "   $((SECONDS - start)) s"
}
part 150 "$python" -m pytest -m gpu -rfE tests
part 160 "$python" benchmarks/gpu_exact.py --seconds 120
part 90 "$python" benchmarks/gpu.py --rounds 4
part 100 "$python" benchmarks/gpu_sizes.py --seconds 60 --rounds 5
part 80 "$python" benchmarks/rollout_vs_generate.py --device cuda --repeats 3 --cases 0 1 \
    --results "$results/rollout_vs_generate.jsonl"
part 90 "$python" benchmarks/run.py adopt_cost --device cuda --hidden 2048 --rows 16 --length 512 --new 64
part 200 "$python" benchmarks/run.py adopt_families --device cuda --precisions bf16 --seconds 180
part 120 "$python" benchmarks/gpu_demo.py --device cuda --steps 10 --warm-start 100
exit "$failed"
