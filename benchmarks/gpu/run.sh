#!/usr/bin/env bash
# The tests that need a card, then predictions beside measurements, on a machine with a CUDA card.
#
#     benchmarks/gpu/run.sh [WHEELS]
#
# WHEELS: a folder of wheels; they are installed from there alone, into an environment of their own
# that sees what is installed already (PyTorch above all). Without it nothing is installed.
#
#   PYTHON=python3        the interpreter to use
#   OUT=benchmarks/gpu/results   takes the benchmark's JSON and the steps' logs
#   MINUTES=8             limit of the benchmark
#   TEST_LIMIT_S=180      limit of the tests
#
# Each step is reported; one that fails does not keep the next one from running. The exit code is
# the number of steps that failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

wheels=${1:-}
python=${PYTHON:-python3}
out=${OUT:-benchmarks/gpu/results}
minutes=${MINUTES:-8}
test_limit_s=${TEST_LIMIT_S:-180}
packages=(trl optuna datasets peft accelerate transformers bitsandbytes typer rich PyYAML pytest hypothesis)

failed=0
summary=()
mkdir -p "$out"

# note NAME CODE: keep what became of a step
note() {
    if [ "$2" -eq 0 ]; then
        summary+=("ok      $1")
    elif [ "$2" -eq 124 ] || [ "$2" -eq 137 ]; then
        summary+=("FAILED  $1: out of time")
        failed=$((failed + 1))
    else
        summary+=("FAILED  $1: exit code $2")
        failed=$((failed + 1))
    fi
    echo "== ${summary[-1]} (after $SECONDS s)"
}

if [ -n "$wheels" ] && [ -d "$wheels" ]; then
    wheels=$(cd "$wheels" && pwd)
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
    if "$python" -m venv --system-site-packages "$place/venv" >"$out/install.log" 2>&1; then
        # If the interpreter belongs to an environment itself, that one's packages are seen too.
        "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
            >"$(echo "$place"/venv/lib/python*/site-packages)/outer.pth"
        python=$place/venv/bin/python
    else
        echo "no environment of its own can be made: installing into that of $python"
    fi
    pip=("$python" -m pip install --quiet --no-index --find-links "$wheels")
    if ! "${pip[@]}" "${packages[@]}" >>"$out/install.log" 2>&1; then
        echo "not all dependencies can be had: installing what is there, without dependencies"
        # PyTorch is what fits the card, and stays.
        mapfile -t files < <(find "$wheels" -maxdepth 1 -name '*.whl' |
            grep -vE '/(torch|triton|nvidia[^/]*|trl_autotune)-[^/]*$' | sort)
        if [ "${#files[@]}" -gt 0 ] &&
            ! "${pip[@]}" --no-deps "${files[@]}" >>"$out/install.log" 2>&1; then
            # One wheel that does not fit must not keep the others out.
            for file in "${files[@]}"; do
                "${pip[@]}" --no-deps "$file" >>"$out/install.log" 2>&1 ||
                    echo "not installed: $(basename "$file")"
            done
        fi
    fi
    for module in torch "${packages[@]/PyYAML/yaml}"; do
        "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$module') is None)"
        code=$?
        [ "$code" -eq 0 ] || note "install: $module is missing" "$code"
    done
    note "install (see install.log)" 0
    if ! "${pip[@]}" --no-deps trl-autotune >>"$out/install.log" 2>&1 &&
        ! "${pip[@]}" --no-deps . >>"$out/install.log" 2>&1; then
        echo "the project is used from the checkout: it could not be installed"
    fi
elif [ -n "$wheels" ]; then
    note "install: there is no folder $wheels" 1
fi
# What is here goes before what is installed.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

timeout --kill-after=10 60 "$python" -m autotune doctor >"$out/doctor.log" 2>&1
note "autotune doctor (see doctor.log)" $?

timeout --kill-after=10 "$test_limit_s" "$python" -m pytest -q -m gpu tests/gpu 2>&1 |
    tee "$out/tests.log"
note "tests" "${PIPESTATUS[0]}"

limit_s=$("$python" -c "print(int($minutes * 60 + 60))")
timeout --kill-after=10 "$limit_s" "$python" benchmarks/gpu/predicted_vs_measured.py \
    --minutes "$minutes" --folder "$out" 2>&1 | tee "$out/benchmark.log"
note "benchmark" "${PIPESTATUS[0]}"
echo "== all steps"
printf '%s\n' "${summary[@]}"
exit "$failed"
