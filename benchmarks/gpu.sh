#!/usr/bin/env bash
# What has to be run on a GPU, with the torch that a machine has, part by part; see benchmarks/README.md.
#
#   benchmarks/gpu.sh FOLDER [PART...]    runs the parts, all if none is named; logs and results are packed into FOLDER
#   benchmarks/gpu.sh --smoke FOLDER [PART...]    a tiny version of each, on a CPU
#   benchmarks/gpu.sh --pack              puts data and small packages into build/gpu, for a machine without a network
#
# Tests that passed are not run again (--fresh does), and a benchmark goes on where it was; the state is in build/gpu/run.
# PYTHON is the interpreter that has torch (python3), LIMIT the seconds for everything (1500), JOBS the processes of tests.
# shellcheck disable=SC2329 # parts are called by their names
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
readonly ROOT=$PWD HOME_OF_RUNS=$PWD/build/gpu
readonly PARTS=(tests throughput speed conformance wrapping notebooks quality) # the most telling first
declare -A SECONDS_OF=([tests]=270 [throughput]=180 [speed]=420 [conformance]=240 [wrapping]=120 [notebooks]=180 [quality]=570)
readonly PACKED=(fashion-mnist uci-regression cifar10/train.npz cifar10/test.npz) # below WORKBENCH_DATA
# small enough to be packed; pandas, scikit-learn, scipy, matplotlib, pillow and torch are the machine's
readonly WHEELS=(safetensors tqdm filelock pyyaml jinja2 pytest pytest-xdist expecttest nbformat nbclient nbconvert papermill ipykernel
    ipywidgets)
readonly UNUSED=(debugpy jedi parso widgetsnbextension jupyterlab_widgets) # of what those bring: half of their bytes
readonly IMPORTS=(torch numpy safetensors tqdm pandas sklearn scipy matplotlib PIL filelock jinja2 yaml torchmetrics pytest xdist
    expecttest nbformat nbconvert papermill ipykernel ipywidgets)

smoke=0 fresh=0 pack=0
while [[ ${1:-} == --* ]]; do
    case $1 in
    --smoke) smoke=1 ;;
    --fresh) fresh=1 ;;
    --pack) pack=1 ;;
    --help) sed -n '2,/^# PYTHON/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "there is no option $1: --smoke, --fresh, --pack" >&2; exit 2 ;;
    esac
    shift
done
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-$((smoke ? 180 : 1500))}
JOBS=${JOBS:-$((smoke ? 0 : 6))}

# ---- before the machine is there
pack_data() {
    local data=${WORKBENCH_DATA:-$ROOT/datasets} file
    mkdir -p "$HOME_OF_RUNS/data" "$HOME_OF_RUNS/wheels"
    for file in "${PACKED[@]}"; do
        if [[ ! -e $data/$file ]]; then
            echo "missing: $data/$file (set WORKBENCH_DATA)" >&2
            return 1
        fi
        mkdir -p "$HOME_OF_RUNS/data/$(dirname "$file")"
        cp -rf --no-preserve=mode "$data/$file" "$HOME_OF_RUNS/data/$(dirname "$file")/"
    done
    "$PYTHON" -m pip download --quiet --dest "$HOME_OF_RUNS/wheels" --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "${WHEELS[@]}" ||
        echo "wheels can't be downloaded: the machine must have ${WHEELS[*]}" >&2
    for file in "${UNUSED[@]}"; do
        rm -f "$HOME_OF_RUNS/wheels/$file"-*.whl
    done
    du --apparent-size -sm build/gpu/wheels build/gpu/data/*
    echo "$(git ls-files -z | du --apparent-size --files0-from=- -cm | tail -1 | cut -f1) MiB are the checkout's. Where 60 MiB at a time are" \
        "the most: wheels, fashion-mnist and uci-regression first, and cifar10 for the parts throughput and quality by itself."
}

# ---- on the machine
prepare() {
    local wheel
    local -a lacking
    mapfile -t lacking < <("$PYTHON" - "$HOME_OF_RUNS"/wheels/*.whl <<'PYTHON'
import sys
from importlib import metadata
from pathlib import Path

for wheel in sys.argv[1:]:
    try:
        metadata.version(Path(wheel).name.split("-")[0])
    except metadata.PackageNotFoundError:
        if Path(wheel).is_file():
            print(wheel)
PYTHON
    )
    # beside what the interpreter has, and nothing of that again: its torch stays the one there is. A virtual environment would not do:
    # where the interpreter is in one itself, --system-site-packages does not see its packages
    for wheel in "${lacking[@]}"; do
        "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$HOME_OF_RUNS/site" --upgrade "$wheel" ||
            echo "$wheel can't be installed"
    done
    export PYTHONPATH=$ROOT:$HOME_OF_RUNS/site PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
    # what is packed comes first; else the user's folder, as everywhere
    [[ -d $HOME_OF_RUNS/data ]] && export WORKBENCH_DATA=$HOME_OF_RUNS/data
    export WORKBENCH_BENCH_CACHE=$HOME_OF_RUNS/cache
    "$PYTHON" - "${IMPORTS[@]}" <<'PYTHON'
import importlib.util
import platform
import sys

missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print("missing:", *(missing or ["nothing"]))
if "torch" in missing:
    sys.exit("no torch: name an interpreter that has it, PYTHON=/path/to/python")
import torch

device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
print(f"Python {platform.python_version()}, torch {torch.__version__}, {device}")
PYTHON
}

plugin() { # the options of pytest --notebooks, where the package is not installed
    "$PYTHON" -c 'from importlib.metadata import entry_points as e
print("" if any(p.name == "workbench" for p in e(group="pytest11")) else "-pworkbench.pytest_plugin")'
}

bench() { # NAME and its options; into the part's folder
    local -a how=(--output "$work")
    if ((smoke)); then how+=(--smoke); fi
    "$PYTHON" -m workbench bench "$@" "${how[@]}"
}

tests() { "$PYTHON" -m pytest -q -p no:cacheprovider -n "$JOBS" tests/engine/test_gpu.py; }

conformance() { # the cells that the plain suite checks, and as many again
    local -a some=()
    if ((smoke)); then some=(-k "mlp-vote"); fi
    WORKBENCH_TEST_DEVICE=$device "$PYTHON" -m pytest -q -p no:cacheprovider -n "$JOBS" -m "not slow" --maxfail 60 tests/test_conformance.py \
        "${some[@]}"
}

notebooks() {
    local which=notebooks option
    option=$(plugin)
    if ((smoke)); then which=notebooks/explorer.ipynb; fi # the shortest
    "$PYTHON" -m pytest -q -p no:cacheprovider -n "$JOBS" ${option:+"$option"} --notebooks --notebook-timeout 150 "$which"
}

speed() { if ((smoke)); then bench speed -g model=mlp; else bench speed -g on=cuda --timeout 90; fi; }

wrapping() { if ((smoke)); then bench wrapping -g model=mlp; else bench wrapping -g on=cuda --timeout 60; fi; }

throughput() { if ((smoke)); then bench throughput -g "method=sculpt 1"; else bench throughput -g on=cuda -g model=lenet5,cnn --timeout 120; fi; }

quality() { if ((smoke)); then bench throughput -g method=vote; else bench throughput -g on=cuda -g model=resnet18 --timeout 560; fi; }

run_part() { # NAME, seconds left: its closing line goes to the screen and into summary.txt
    local name=$1 left=$2 seconds start=$SECONDS code told
    export work=$runs/$name
    seconds=$((!smoke && SECONDS_OF[$name] < left ? SECONDS_OF[$name] : left))
    if ((fresh)); then rm -rf "$work"; fi
    mkdir -p "$work"
    if [[ -f $work/done ]]; then
        told="done before"
    elif ((seconds < 10)); then
        told="no time is left"
        failed=1
    else
        # in a process group of its own, so that the time limit ends all that it started
        timeout --kill-after=20 "$seconds" "$BASH" -c "$name" </dev/null >>"$work/log.txt" 2>&1
        code=$?
        case $code in
        0)
            told=ok
            compgen -G "$work/*.csv" >/dev/null || touch "$work/done" # a benchmark knows itself which cells it has
            ;;
        124 | 137) told="ended after its $seconds s" ;;
        *) told="failed ($code)" ;;
        esac
        if ((code)); then failed=1; fi
    fi
    told="$name: $told, $((SECONDS - start)) s; $(grep -v '^ *$' "$work/log.txt" 2>/dev/null | tail -1 | cut -c1-200)"
    echo "$told" | tee -a "$folder/summary.txt"
    tar -czf "$folder/$name.tar.gz" -C "$runs" "$name"
}

if ((pack)); then
    pack_data
    exit
fi
folder=${1:-}
if [[ -z $folder ]]; then
    echo "usage: benchmarks/gpu.sh [--smoke] [--fresh] FOLDER [PART...]; parts: ${PARTS[*]}" >&2
    exit 2
fi
shift
chosen=("${@:-${PARTS[@]}}")
for name in "${chosen[@]}"; do
    if [[ -z ${SECONDS_OF[$name]:-} ]]; then
        echo "there is no part $name: ${PARTS[*]}" >&2
        exit 2
    fi
done
runs=$HOME_OF_RUNS/run
if ((smoke)); then
    runs=$(mktemp -d)
    trap 'rm -rf "$runs"' EXIT
fi
mkdir -p "$folder" "$runs"
folder=$(cd "$folder" && pwd)
prepare >"$runs/machine.txt" 2>&1 # in this shell, whose environment it changes
ready=$?
tee -a "$folder/summary.txt" <"$runs/machine.txt"
if ((ready)); then exit 1; fi
device=cuda
if ((smoke)); then device=cpu; fi
export PYTHON JOBS smoke device
export -f bench plugin "${PARTS[@]}"
failed=0
for name in "${chosen[@]}"; do
    run_part "$name" $((LIMIT - SECONDS))
done
exit "$failed"
