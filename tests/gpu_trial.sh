#!/usr/bin/env bash
# All that a GPU can show, on a bare machine with one card and no package registry, in under 10 minutes:
#
#     tests/gpu_trial.sh FOLDER [PHASES [MODELS]]
#
# FOLDER has what the machine lacks, for its own Python: wheels (msgspec, pulp, highspy, rich, click), and for messages by
# NCCL between ranks of one card libnccl.pruned.so.xz: the library of nvidia-nccl-cu13 2.30 or later, which is preloaded (of
# 300 MB the machine code of one architecture is enough). OUT, if set, gets the logs. PHASES: some of
# "suite graphs links races memory"; all by default. MODELS: to race, some of "gpt_wide vgg16_large resnet50". The short table at the end is what docs/gpu.md is made from.
set -u
cd "$(dirname "$0")/.."
folder=${1:?FOLDER with wheels and libnccl.pruned.so.xz} phases=" ${2:-suite graphs links races memory} "
models=${3:-gpt_wide vgg16_large resnet50}
out=${OUT:-$(mktemp -d)} site=$(mktemp -d)
begun=$SECONDS
said() { printf '%s\n' "$*" | tee -a "$out/table"; }
ran() { printf '   [%s: exit %s, %s s]\n' "$1" "$2" "$((SECONDS - begun))"; }

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
ran set-up $?

if [[ $phases == *" suite "* ]]; then
    env "${own[@]}" timeout 230 python3 -m pytest tests/test_gpus.py -n 8 --dist worksteal -q --timeout 50 -p no:cacheprovider > "$out/suite" 2>&1
    code=$?
    grep -E '^(FAILED|ERROR)' "$out/suite" | cut -c1-170 | head -40
    said "suite: $(tail -n 1 "$out/suite")"
    ran suite $code
fi

# Without others on the card: what is slow here is the host.
if [[ $phases == *" graphs "* ]]; then
    timeout 75 python3 -m timeprest.tests.benchmarks.speed.graphs "$site/graphs" gpt resnet50 > "$out/graphs" 2>&1
    code=$?
    said "$(grep -E ' ms' "$out/graphs" || tail -n 4 "$out/graphs")"
    ran graphs $code
fi

if [[ $phases == *" links "* ]]; then
    timeout 50 python3 -m timeprest.tests.benchmarks.speed.hand_over > "$out/links" 2>&1
    code=$?
    said "$(grep MiB "$out/links" || tail -n 4 "$out/links")"
    env "${own[@]}" timeout 40 python3 -c 'from timeprest.cli import tp_profile; tp_profile()' --links --device cuda -q \
        -o "$site/cluster.toml" >> "$out/links" 2>&1
    said "tp-profile --links: $(grep -E 'bandwidth|latency' "$site/cluster.toml" | tr '\n' ' ' || tail -n 2 "$out/links")"
    ran links $code
fi

if [[ $phases == *" memory "* ]]; then
    timeout 100 python3 -m timeprest.tests.benchmarks.speed.gpu_memory "$site/memory" gpt_wide > "$out/memory" 2>&1
    code=$?
    said "$(grep GiB "$out/memory" || tail -n 4 "$out/memory")"
    ran memory $code
fi

# What is measured and planned for one stays for the next; of each, no more than fits the time.
race() {
    timeout "$3" python3 -m timeprest.tests.benchmarks.speed --device cuda --noisy --no-search --rounds 1 --patience 0 \
        --profile-seconds 3 --models "$1" --contestants "$2" --at-most "$3" --work "$site/races" \
        --results "$site/$1.json" --page "$site/$1.md" > "$out/race-$1" 2>&1
    code=$?
    said "$(grep -E '^[a-z0-9_]+ .*(ms a mini-batch|failed|left out)' "$out/race-$1" | cut -d';' -f1 | cut -c1-150)"
    ran "race $1" $code
}

if [[ $phases == *" races "* ]]; then
    for model in $models; do
        case $model in
            gpt_wide) race "$model" one-thread,alone,tdp-1f1b@4,timeprest,timeprest=tdp-1f1b@4 120 ;;
            resnet50) race "$model" timeprest@1,timeprest@4,one-thread,tdp-1f1b@4 60 ;;
            *) race "$model" timeprest,one-thread,alone,tdp-1f1b@4 60 ;;
        esac
    done
fi
said "$((SECONDS - begun)) s"
