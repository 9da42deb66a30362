#!/usr/bin/env bash
# On a machine with a GPU, and no network: the GPU tests, then the op benchmarks, in under five minutes.
#   benchmarks/device_check.sh [results folder]        (PYTHON names another interpreter)
# Writes ops.json (pytest-benchmark's own format, GB/s beside a measured copy in extra_info), tests.xml and device.json.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-benchmarks/results/device}
mkdir -p "$out"
unset TRITON_INTERPRET

"$python" - "$out" <<'PY' || exit 1
import json, sys
import torch, triton
import capt_kernels
if not torch.cuda.is_available():
    sys.exit("device_check: torch sees no GPU here")
capability = torch.cuda.get_device_capability()
facts = {
    "gpu": torch.cuda.get_device_name(),
    "capability": capability,
    "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
    "torch": torch.__version__,
    "triton": triton.__version__,
    "backends": {name: list(status) for name, status in capt_kernels.backends().items()},
}
print(json.dumps(facts, indent=2))
with open(f"{sys.argv[1]}/device.json", "w") as file:
    json.dump(facts, file, indent=2)
PY

timeout 110 "$python" -m pytest tests/capt_kernels -q --maxfail=20 -k "triton or large" -p no:cacheprovider --junitxml="$out/tests.xml"
tests=$?
timeout 170 "$python" -m pytest benchmarks/test_ops.py benchmarks/test_attention.py --benchmark-only --slow -q -p no:cacheprovider --benchmark-json="$out/ops.json"
benchmarks=$?
echo "tests: exit $tests; benchmarks: exit $benchmarks; results in $out"
exit $((tests || benchmarks))
