#!/usr/bin/env bash
# What has to be run on a GPU, with the torch that a machine has, part by part; see benchmarks/README.md.
#
#   benchmarks/gpu.sh FOLDER [PART...]    runs the parts, all if none is named; logs and results are packed into FOLDER
#   benchmarks/gpu.sh --smoke FOLDER [PART...]    a tiny version of each, on a CPU
#   benchmarks/gpu.sh --pack              puts data and small packages into build/gpu/load.tar.xz, for a machine without a network
#   benchmarks/gpu.sh --list              calls, their parts and the seconds of each
#
# A call, first, second or third, is some parts that fit into 570 seconds together; rest is what there may be time for.
# Tests that passed are not run again (--fresh does), and a benchmark goes on where it was; the state is in build/gpu/run.
# PYTHON is the interpreter that has torch (python3), LIMIT the seconds for everything (570 where parts are named, else
# 1500), JOBS the processes of tests, BUILD the folder that is called build/gpu here.
# shellcheck disable=SC2329 # parts are called by their names
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
readonly ROOT=$PWD HOME_OF_RUNS=${BUILD:-$PWD/build/gpu}
readonly ORDER=(first second third rest) # the most telling first
declare -rA CALLS=([first]="tests conformance throughput speed" [second]="large compiled peers wrapping" [third]="quality notebooks"
    [rest]="human others")
declare -rA SECONDS_OF=([tests]=80 [conformance]=120 [throughput]=140 [speed]=210 [large]=110 [compiled]=280 [peers]=40 [quality]=390
    [notebooks]=150 [wrapping]=100 [human]=150 [others]=300)
readonly FILES=8 MIB=16 # what comes back from a machine at most: so many files, each of so many MiB
# pytorch's images for GPUs hold pandas, scikit-learn, scipy, matplotlib, pillow and the like; what they lack is small
readonly WHEELS=(expecttest nbformat nbclient nbconvert papermill ipykernel ipywidgets anywidget)
readonly PEERS=(torch-uncertainty laplace-torch asdfghjkl==0.1a4 backpack-for-pytorch curvlinops-for-pytorch unfoldNd einconv) # without what they ask for
# of what the first bring: what such images hold, and what is large and not needed
readonly THERE=(aiohttp aiohappyeyeballs aiosignal attrs certifi charset_normalizer click frozenlist idna jinja2 markupsafe multidict
    packaging propcache psutil pygments python_dateutil pyyaml requests six tqdm typing_extensions urllib3 yarl)
readonly UNUSED=(debugpy jedi parso widgetsnbextension jupyterlab_widgets tzdata)
readonly IMPORTS=(torch numpy safetensors tqdm pandas sklearn scipy matplotlib PIL filelock jinja2 yaml torchmetrics pytest xdist
    expecttest nbformat nbconvert papermill ipykernel ipywidgets anywidget)
# what a newer Python or torch announces is for us to read, and no failure of a GPU
readonly PYTEST=(-m pytest -q -p no:cacheprovider -W default::DeprecationWarning -W default::PendingDeprecationWarning
    -W default::FutureWarning)

list() {
    local call part
    for call in "${ORDER[@]}"; do
        for part in ${CALLS[$call]}; do
            echo "$call $part ${SECONDS_OF[$part]}"
        done
    done
    exit
}

smoke=0 fresh=0 pack=0
while [[ ${1:-} == --* ]]; do
    case $1 in
    --smoke) smoke=1 ;;
    --fresh) fresh=1 ;;
    --pack) pack=1 ;;
    --list) list ;;
    --help) sed -n '2,/^# shellcheck/{/^# shellcheck/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "there is no option $1: --smoke, --fresh, --pack, --list" >&2; exit 2 ;;
    esac
    shift
done
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$((smoke ? 0 : $(nproc) * 3 / 4))}

# ---- before the machine is there
pack_load() {
    local name
    local -a for_machine=(--quiet --dest "$HOME_OF_RUNS/wheels" --only-binary=:all: --python-version 3.12 --implementation cp
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
    rm -rf "$HOME_OF_RUNS/wheels"
    mkdir -p "$HOME_OF_RUNS/wheels"
    "$PYTHON" -m pip download "${for_machine[@]}" "${WHEELS[@]}" || echo "wheels can't be downloaded: the machine must have ${WHEELS[*]}" >&2
    "$PYTHON" -m pip download "${for_machine[@]}" --no-deps "${PEERS[@]}" || echo "packages to compare with can't be downloaded" >&2
    for name in "${THERE[@]}" "${UNUSED[@]}"; do
        rm -f "$HOME_OF_RUNS/wheels/$name"-*.whl
    done
    "$PYTHON" benchmarks/gpu_load.py pack "${WORKBENCH_DATA:-$ROOT/datasets}" "$HOME_OF_RUNS" \
        "$(git ls-files -z --cached --others --exclude-standard | du --apparent-size --files0-from=- -cb | tail -1 | cut -f1)"
}

# ---- on the machine
prepare() {
    # a virtual environment would not do: where the interpreter is in one itself, --system-site-packages does not see its packages
    "$PYTHON" benchmarks/gpu_load.py unpack "$HOME_OF_RUNS" "${UNUSED[@]}"
    export PYTHONPATH=$ROOT:$HOME_OF_RUNS/site PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
    # what is packed comes first; else the user's folder, as everywhere
    [[ -d $HOME_OF_RUNS/data ]] && export WORKBENCH_DATA=$HOME_OF_RUNS/data
    export WORKBENCH_BENCH_CACHE=$HOME_OF_RUNS/cache
    # kept between calls, and out of reach of other programs that compile at the same time
    export TORCHINDUCTOR_CACHE_DIR=$HOME_OF_RUNS/inductor
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

tests() { "$PYTHON" "${pytest[@]}" -n "$JOBS" tests/engine/test_gpu.py tests/engine/test_gpu_graphs.py; }

conformance() { # the cells that the plain suite checks, and as many again
    local -a some=()
    if ((smoke)); then some=(-k "mlp-vote"); fi
    WORKBENCH_TEST_DEVICE=$device "$PYTHON" "${pytest[@]}" -n "$JOBS" -m "not slow" --maxfail 60 tests/test_conformance.py "${some[@]}"
}

notebooks() {
    local which=notebooks option
    option=$(plugin)
    if ((smoke)); then which=notebooks/explorer.ipynb; fi # the shortest
    "$PYTHON" "${pytest[@]}" -n "$JOBS" ${option:+"$option"} --notebooks --notebook-timeout 150 --notebook-device "$device" "$which"
}

speed() { if ((smoke)); then bench speed -g model=mlp; else bench speed -g on=cuda -g how=auto,tune -g dtype=float32 --timeout 90; fi; }

large() { if ((smoke)); then bench speed -g model=vit; else bench speed -g on=cuda -g model=resnet50,vit,gpt2-1024 --timeout 60; fi; }

# in small without the compiler itself, whose C++ libraries failed to load in some runs beside other tests, with torch's "undefined symbol"
compiled() { if ((smoke)); then TORCHDYNAMO_DISABLE=1 bench speed -g how=compiled; else bench speed -g on=cuda -g how=compiled --timeout 120; fi; }

peers() { if ((smoke)); then bench speed -g peer=torch-uncertainty; else bench speed -g on=cuda -g peer=torch-uncertainty,laplace-torch --timeout 60; fi; }

others() { if ((smoke)); then bench speed -g "wrapper=sculpt 1"; else bench speed -g on=cuda --timeout 90; fi; }

wrapping() { if ((smoke)); then bench wrapping -g model=mlp; else bench wrapping -g on=cuda --timeout 60; fi; }

throughput() { if ((smoke)); then bench throughput -g "method=sculpt 1"; else bench throughput -g on=cuda -g model=lenet5,cnn --timeout 120; fi; }

quality() { if ((smoke)); then bench throughput -g method=vote; else bench throughput -g on=cuda -g model=resnet18 --timeout 390; fi; }

human() { if ((smoke)); then bench human -g on=published -g labels=people; else bench human -g on=published,tuned -j 8 --timeout 140; fi; }

run_part() { # NAME, seconds left: its closing line goes to the screen and into summary.txt
    local name=$1 left=$2 seconds start=$SECONDS code told
    export work=$runs/$name
    case $name in
    large | compiled | peers | others) work=$runs/speed ;; # cells of one benchmark
    quality) work=$runs/throughput ;;
    esac
    local log=$work/$name.txt
    seconds=$((!smoke && SECONDS_OF[$name] < left ? SECONDS_OF[$name] : left))
    mkdir -p "$work"
    if [[ -f $work/$name.done ]]; then
        told="done before"
    elif ((seconds < 10)); then
        told="no time is left"
        failed=1
    else
        # in a process group of its own, so that the time limit ends all that it started
        timeout --kill-after=20 "$seconds" "$BASH" -c "pytest=(${PYTEST[*]}); $name" </dev/null >>"$log" 2>&1
        code=$?
        case $code in
        0)
            told=ok
            compgen -G "$work/*.csv" >/dev/null || touch "$work/$name.done" # a benchmark knows itself which cells it has
            ;;
        124 | 137) told="ended after its $seconds s" ;;
        *) told="failed ($code)" ;;
        esac
        if ((code)); then failed=1; fi
    fi
    told="$name: $told, $((SECONDS - start)) s; $(grep -v '^ *$' "$log" 2>/dev/null | tail -1 | cut -c1-200)"
    echo "$told" | tee -a "$folder/summary.txt"
    if [[ -s $log && $(stat -c %s "$log") -gt $((1 << 20)) ]]; then
        tail -c $((1 << 20)) "$log" >"$log.end" && mv "$log.end" "$log"
    fi
    tar -czf "$runs.tar.gz" -C "$(dirname "$runs")" "$(basename "$runs")" && mv "$runs.tar.gz" "$folder/results.tar.gz"
}

fits() { # whether all of FOLDER comes back
    local many large
    many=$(find "$folder" -type f | wc -l)
    large=$(find "$folder" -type f -size +"$MIB"M)
    if ((many > FILES)); then echo "$folder has $many files, where $FILES are the most that come back" >&2; fi
    if [[ -n $large ]]; then echo "larger than the $MIB MiB that come back: $large" >&2; fi
    [[ $many -le $FILES && -z $large ]]
}

if ((pack)); then
    pack_load
    exit
fi
folder=${1:-}
if [[ -z $folder ]]; then
    echo "usage: benchmarks/gpu.sh [--smoke] [--fresh] FOLDER [PART...]; calls: ${ORDER[*]}; parts: ${!SECONDS_OF[*]}" >&2
    exit 2
fi
shift
LIMIT=${LIMIT:-$((smoke ? 240 : $# ? 570 : 1500))}
chosen=()
for name in "${@:-${ORDER[@]}}"; do
    if [[ -n ${CALLS[$name]:-} ]]; then
        read -ra parts <<<"${CALLS[$name]}"
        chosen+=("${parts[@]}")
    elif [[ -n ${SECONDS_OF[$name]:-} ]]; then
        chosen+=("$name")
    else
        echo "there is no part $name: ${ORDER[*]} ${!SECONDS_OF[*]}" >&2
        exit 2
    fi
done
runs=$HOME_OF_RUNS/run
if ((smoke)); then
    temporary=$(mktemp -d)
    trap 'rm -rf "$temporary"' EXIT
    runs=$temporary/run
fi
if ((fresh)); then rm -rf "$runs"; fi
mkdir -p "$folder" "$runs"
folder=$(cd "$folder" && pwd)
prepare >"$runs/machine.txt" 2>&1 # in this shell, whose environment it changes
ready=$?
tee -a "$folder/summary.txt" <"$runs/machine.txt"
if ((ready)); then exit 1; fi
device=cuda
if ((smoke)); then device=cpu; fi
export PYTHON JOBS smoke device
export -f bench plugin "${!SECONDS_OF[@]}"
failed=0
for name in "${chosen[@]}"; do
    run_part "$name" $((LIMIT - SECONDS))
done
fits || failed=1
exit "$failed"
