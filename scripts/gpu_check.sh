#!/usr/bin/env bash
# What a machine with a GPU makes of specjax: the same texts, tokens per second, what a window costs, memory bandwidth.
#
#     scripts/gpu_check.sh                               # one GPU of 80 GB or more; results in runs/gpu
#     STAGES="model shapes" BATCH="1 16" OUT=runs/a scripts/gpu_check.sh
#     TOY=1 OUT=/tmp/toy scripts/gpu_check.sh            # tiny models on a CPU: does the script itself work?
#
# NOT YET RUN ON A GPU: it has been tested with TOY=1 on a CPU only.
#
#   tests    tests of exactness and parity on this platform, tests that need eight devices left out
#   model    TARGET plain and with the drafter that comes with it, by scripts/bench.py: tokens/s, texts compared
#   shapes   a large target and a draft model with random weights, by scripts/gpu_check.py: plain step, draft step,
#            verify(T)/plain, tokens/s at an assumed acceptance, share of the memory bandwidth
#
# A stage that fails, or takes longer than LIMIT seconds, does not end the others; the last lines say which did, and the
# status is then 1. The target must be in the cache if the machine has no network (SPECJAX_CACHE, or TARGET=directory).
# Needs bash, coreutils and the extras `gpu` and `test`.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

began=$SECONDS
TOY=${TOY:-0}
if [ "$TOY" = 1 ]; then
    : "${PLATFORM:=cpu}" "${TARGET:=tests/data/tiny_models/llama3_rope_scaled}" "${DRAFTER:=ngram}" "${NEW_TOKENS:=8}"
    : "${BATCH:=1 2}" "${REPEATS:=1}" "${TURNS:=1}" "${SHAPE:=64,16,32,2,4,2}" "${DRAFT_SHAPE:=64,16,32,1,4,2}"
    : "${WINDOWS:=1 2 4}" "${CAPACITY:=16}" "${LENGTH:=8}" "${READ_GB:=0.01}" "${TESTS:=tests/test_accept_input.py}"
fi
PLATFORM=${PLATFORM:-cuda,cpu} OUT=${OUT:-runs/gpu} PYTHON=${PYTHON:-python} STAGES=${STAGES:-tests model shapes}
LIMIT=${LIMIT:-600} BATCH=${BATCH:-1 8 32}
# The most telling first: LIMIT may end them.
TESTS=${TESTS:-tests/test_smollm2.py tests/models/test_llama.py tests/models/test_attention.py tests/test_round.py tests/drafters/test_model.py
    tests/drafters/test_ngram.py tests/test_accept.py tests/test_accept_numerics.py tests/test_warp.py
    tests/test_noise.py tests/test_cache.py}
TARGET=${TARGET:-smollm2-135m-instruct} DRAFTER=${DRAFTER:-} PROMPTS=${PROMPTS:-}  # default: what comes with them
NEW_TOKENS=${NEW_TOKENS:-128} REPEATS=${REPEATS:-2}
SHAPE=${SHAPE:-llama3-8b} DRAFT_SHAPE=${DRAFT_SHAPE:-llama3-1b} DTYPE=${DTYPE:-bfloat16}
WINDOWS=${WINDOWS:-1 2 4 8 16 32 64} CAPACITY=${CAPACITY:-512} LENGTH=${LENGTH:-300} ALPHA=${ALPHA:-0.6 0.8}
TURNS=${TURNS:-9} READ_GB=${READ_GB:-4}

refuse() { echo "gpu_check.sh: $*" >&2; exit 2; }
[ $# = 0 ] || refuse "$1: no arguments; sizes are environment variables, see the head of the script"
[[ $TOY = [01] ]] || refuse "TOY=$TOY: 0 or 1"
for name in LIMIT BATCH NEW_TOKENS REPEATS WINDOWS CAPACITY LENGTH TURNS; do
    [ -n "${!name// /}" ] || refuse "$name is empty"
    for word in ${!name}; do [[ $word =~ ^[1-9][0-9]*$ ]] || refuse "$name=${!name}: whole numbers from 1"; done
done
[ -n "${STAGES// /}" ] || refuse "STAGES is empty"
for word in $STAGES; do
    case $word in tests | model | shapes) ;; *) refuse "STAGES=$STAGES: any of tests, model, shapes" ;; esac
done
export JAX_PLATFORMS=$PLATFORM SPECJAX_TEST_PLATFORM=$PLATFORM
# jax falls back to the CPU without a word.
"$PYTHON" -c 'import sys, jax; print(jax.devices(sys.argv[1]))' "${PLATFORM%%,*}" ||
    refuse "PLATFORM=$PLATFORM: jax finds no such device; pip install '.[gpu,test]', or PLATFORM=cpu"
mkdir -p "$OUT" || refuse "OUT=$OUT: cannot be made"

failed=()
elapsed() { echo "[$((SECONDS - began)) s] $*"; }

# stage NAME COMMAND..: what it prints also goes to $OUT/NAME.log; it may fail.
stage() {
    local name=$1 start=$SECONDS code=0
    shift
    elapsed "$name: at most $LIMIT s"
    timeout --foreground --signal=INT --kill-after=30 "$LIMIT" env --default-signal=INT "$@" 2>&1 |
        tee "$OUT/$name.log" || code=$?
    case $code in
        0) elapsed "$name: done in $((SECONDS - start)) s" ;;
        124 | 137) elapsed "$name: its $LIMIT s are used up"; failed+=("$name (time)") ;;
        130) exit 130 ;;
        *) elapsed "$name failed with status $code"; failed+=("$name (status $code)") ;;
    esac
}

command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
if [ "$TOY" = 1 ] && [ -z "$PROMPTS" ]; then  # token ids: the tiny target has no tokenizer
    PROMPTS=$OUT/prompts.jsonl
    printf '{"prompt": [5, 9, 7, 5, 9]}\n{"prompt": [3, 11, 4, 3, 11, 4]}\n' > "$PROMPTS"
fi

# shellcheck disable=SC2086 # lists are words
for word in $STAGES; do
    case $word in
        tests) stage tests "$PYTHON" -m pytest -q -m "not full" -p no:cacheprovider $TESTS ;;
        model) stage model "$PYTHON" scripts/bench.py ${PROMPTS:+"$PROMPTS"} --model "$TARGET" --batch $BATCH \
            ${DRAFTER:+--drafter $DRAFTER} --max-new-tokens "$NEW_TOKENS" --repeats "$REPEATS" --no-split \
            --json "$OUT/model.json" ;;
        shapes) stage shapes "$PYTHON" scripts/gpu_check.py --target "$SHAPE" --draft "$DRAFT_SHAPE" --dtype "$DTYPE" \
            --batch $BATCH --windows $WINDOWS --capacity "$CAPACITY" --length "$LENGTH" --alpha $ALPHA \
            --repeats "$TURNS" --read-gb "$READ_GB" --json "$OUT/shapes.json" ;;
    esac
done

if [ ${#failed[@]} -gt 0 ]; then
    elapsed "FAILED: $(IFS=,; echo "${failed[*]}"); see $OUT"
    exit 1
fi
elapsed "all stages done; results in $OUT"
