#!/usr/bin/env bash
# One node of a Ray cluster for verl, in verl's container: node.sh RANK HEAD NODES RECIPE.
#
# Rank 0 is the head: it waits for the others, submits the recipe, follows the log and ends as the job does; the others
# end when the head is gone. Ray asks nobody for a password: whoever reaches port 6379 of the head runs programs on every
# node, so the network between the nodes must be your own. The port for jobs, 8265, listens on the head's loopback only.
set -euo pipefail
rank=$1 head=$2 nodes=$3 recipe=$4

pip install --quiet --no-deps "verl==0.9.1"
pip install --quiet --editable ".[ray]"

if [ "$rank" != 0 ]; then
    until ray health-check --address "$head:6379" 2>/dev/null; do sleep 2; done
    exec ray start --address="$head:6379" --block
fi

ray start --head --port=6379 --dashboard-host=127.0.0.1 --dashboard-port=8265 --block &
ray=$!
trap 'kill "$ray"' EXIT
python3 - "$nodes" <<'PYTHON'
import sys
import time

import ray

while not ray.is_initialized():
    try:
        ray.init("127.0.0.1:6379", logging_level="ERROR")
    except ConnectionError:
        time.sleep(2)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(2)
PYTHON
mantissa launch "$recipe" --address http://127.0.0.1:8265
