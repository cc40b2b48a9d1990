#!/usr/bin/env bash
# All that a GPU can show, on a bare machine with one card and no package registry:
#
#     tests/gpu_trial.sh FOLDER [PHASES [MODELS]]
#
# FOLDER has what the machine lacks, for its own Python: wheels (msgspec, highspy, rich, click), and for messages by
# NCCL between ranks of one card libnccl.pruned.so.xz: the library of nvidia-nccl-cu13 2.30 or later, which is preloaded (of
# 300 MB the machine code of one architecture is enough). OUT, if set, gets the logs. PHASES: some of
# "graphs links memory races suite"; all by default, which is over in 18 minutes whatever happens. Where a command has
# 10 minutes, take "graphs suite" (7 at most), "races" (8) and "links memory" (3). MODELS: to race, some of
# "resnet50 gpt gpt_wide vgg16_large". The table at the end, which docs/gpu.md is made from, has what failed too.
set -u
cd "$(dirname "$0")/.."
folder=${1:?FOLDER with wheels and libnccl.pruned.so.xz} phases=" ${2:-graphs links memory races suite} "
models=${3:-resnet50 gpt gpt_wide vgg16_large}
out=${OUT:-$(mktemp -d)} site=$(mktemp -d)
begun=$SECONDS
said() { printf '%s\n' "$*" >> "$out/table"; }
# A phase's NAME, exit code and lines for the table; where it failed, the last ones that it wrote.
ran() {
    printf '   [%s: exit %s, %s s]\n' "$1" "$2" "$((SECONDS - begun))"
    if [ -n "${3:-}" ]; then said "$3"; fi
    if [ "$2" != 0 ]; then said "   $1: exit $2"; tail -n 4 "$out/$1" | cut -c1-170 | sed 's/^/      /' >> "$out/table"; fi
}

python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$folder"/*.whl || exit
ln -sfn "$PWD" "$site/timeprest"
export PYTHONPATH=$site PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
own=()
if [ -f "$folder/libnccl.pruned.so.xz" ]; then
    xz -dc "$folder/libnccl.pruned.so.xz" > "$site/libnccl.so.2"
    own=(LD_PRELOAD="$site/libnccl.so.2" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2
        TIMEPREST_TEST_RANKS_ON_A_CARD=2)
fi
said "$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader), torch $(python3 -c 'import torch; print(torch.__version__)')"

# Without others on the card: what is slow here is the host.
if [[ $phases == *" graphs "* ]]; then
    timeout 140 python3 -m timeprest.tests.benchmarks.speed.graphs "$site/graphs" gpt resnet50 gpt_wide > "$out/graphs" 2>&1
    ran graphs $? "$(grep -E ' ms' "$out/graphs")"
fi

if [[ $phases == *" links "* ]]; then
    timeout 45 python3 -m timeprest.tests.benchmarks.speed.hand_over > "$out/links" 2>&1
    ran links $? "$(grep MiB "$out/links")"
    env "${own[@]}" timeout 30 python3 -c 'from timeprest.cli import tp_profile; tp_profile()' --links --device cuda -q \
        -o "$site/cluster.toml" > "$out/measured-links" 2>&1
    ran measured-links $? "tp-profile --links: $(grep -E 'bandwidth|latency' "$site/cluster.toml" | tr '\n' ' ')"
fi

if [[ $phases == *" memory "* ]]; then
    timeout 80 python3 -m timeprest.tests.benchmarks.speed.gpu_memory "$site/memory" gpt_wide > "$out/memory" 2>&1
    ran memory $? "$(grep GiB "$out/memory")"
fi

# What is measured and planned for one stays for the next. Profile and plan of one may take a minute before it runs; each line
# of the log says when it came.
race() {
    timeout 120 python3 -m timeprest.tests.benchmarks.speed --device cuda --noisy --no-search --rounds 1 --patience 0 \
        --profile-seconds 3 --models "$1" --contestants "$2" --at-most 90 --work "$site/races" \
        --results "$site/$1.json" --page "$site/$1.md" 2>&1 |
        while IFS= read -r line; do printf '%s [%s s]\n' "$line" "$((SECONDS - begun))"; done > "$out/race-$1"
    ran "race-$1" "${PIPESTATUS[0]}" "$(grep -E '^[a-z0-9_]+ .*(ms a mini-batch|failed|left out)' "$out/race-$1" | cut -d';' -f1 | cut -c1-150)"
}

if [[ $phases == *" races "* ]]; then
    for model in $models; do
        case $model in
            gpt_wide) race "$model" tdp-1f1b@4,timeprest=tdp-1f1b@4,timeprest,alone ;;
            resnet50 | gpt) race "$model" tdp-1f1b@4,timeprest=tdp-1f1b@4,timeprest ;;
            *) race "$model" timeprest,one-thread,alone,tdp-1f1b@4 ;;
        esac
    done
fi

if [[ $phases == *" suite "* ]]; then
    env "${own[@]}" timeout 270 python3 -m pytest tests/test_gpus.py -n 8 --dist worksteal -q --timeout 50 -p no:cacheprovider > "$out/suite" 2>&1
    ran suite $? "suite: $(tail -n 1 "$out/suite")
$(grep -E '^(FAILED|ERROR)' "$out/suite" | cut -c1-170 | head -40)"
fi
said "$((SECONDS - begun)) s"
cat "$out/table"
