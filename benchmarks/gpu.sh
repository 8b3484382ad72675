#!/usr/bin/env bash
# Everything that needs one NVIDIA GPU: the tests marked gpu, exactness and its cost, fp8 products, step times, sizes from
# 1M to 1B parameters, rollout speed, adopted families, the demo's recipe in native fp16 and bf16, and the promises made
# for 16 bits. Each part has a limit of its own; together about 20 minutes where all goes well (docs/gpu.md).
#   OUT=/some/folder PYTHON=.venv/bin/python benchmarks/gpu.sh
#   benchmarks/gpu.sh --device cpu --tiny       # every part whole in tiny sizes: no GPU, no Triton, no git; keeps no row
# There the tests of Triton's row kernels and products run interpreted, where Triton is: with torch or in .venv-triton.
# Rows go to $OUT where it is set, else to results/. A part that fails does not stop the next; the exit status says so.
set -uo pipefail
cd "$(dirname "$0")/.."
device=cuda
dry=()
while [ $# -gt 0 ]; do
    case "$1" in
        --device) device="${2:-}"; shift ;;
        --tiny) dry=(--dry) ;;
        *) echo "gpu.sh: expected --device cuda|cpu and --tiny, got $1" >&2; exit 2 ;;
    esac
    shift
done
python="${PYTHON:-python3}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
if [ "$device" = cuda ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || exit 1
    "$python" -c "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda); assert torch.cuda.is_available()" \
        || { echo "gpu.sh: this torch finds no CUDA device" >&2; exit 1; }
    tests=(-rfE)
elif [ "$device" = cpu ] && [ ${#dry[@]} -gt 0 ]; then
    tests=(--collect-only)  # they can be read; those of Triton's kernels run below, where Triton is
else
    echo "gpu.sh: --device cpu measures nothing of a GPU, and goes with --tiny" >&2
    exit 2
fi

failed=0
part() {  # part SECONDS COMMAND...
    local limit="$1" start=$SECONDS
    shift
    echo "== $*"
    timeout "$limit" "$@" || { echo "   failed with status $?"; failed=1; }
    echo "   $((SECONDS - start)) s"
}
# Cases: each in a process of its own with a limit of its own; tiny, all in one, since loading is most of their time.
case_() {  # case_ SECONDS NAME OPTIONS...
    if [ ${#dry[@]} -gt 0 ]; then
        tiny="${tiny:+$tiny,}$2"
    else
        part "$1" "$python" benchmarks/run.py "$2" --device "$device" "${@:3}"
    fi
}
tiny=
part 400 "$python" -m pytest -q -m gpu "${tests[@]}" $(grep -rlE "mark\.gpu|needs_a_device" tests --include='test_*.py')
if [ "$device" = cpu ] && PYTHONPATH="$PYTHONPATH:.venv-triton" "$python" -c "import triton" 2> /dev/null; then
    part 400 env TRITON_INTERPRET=1 PYTHONPATH="$PYTHONPATH:.venv-triton" \
        "$python" -m pytest -q tests/kernels/test_triton_rows.py tests/kernels/test_triton_products.py
fi
case_ 200 gpu_exact
case_ 120 gpu_step --rounds 4
case_ 150 gpu_sizes --seconds 60 --rounds 5
case_ 120 rollout_vs_generate --rounds 3 --cases 0 1
case_ 120 adopt_cost --hidden 2048 --rows 16 --length 512 --new 64
case_ 240 adopt_families --precisions bf16 --seconds 180
case_ 150 gpu_demo --steps 10 --warm-start 100
case_ 240 gpu_promises
[ -z "$tiny" ] || part 1200 "$python" benchmarks/run.py "$tiny" --device "$device" "${dry[@]}"
exit "$failed"
