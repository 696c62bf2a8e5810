#!/usr/bin/env bash
# From a target to a drafter of at most 16 MB on one large GPU, within 12 minutes.
#
#     scripts/train_on_accelerator.sh                     # SmolLM2-135M-Instruct into runs/accelerator
#     PROMPTS=dev.jsonl SPLIT=tune OUT=runs/a scripts/train_on_accelerator.sh
#     TOY=1 OUT=/tmp/toy scripts/train_on_accelerator.sh  # a tiny target on a CPU, under a minute
#
# NOT YET RUN ON A GPU: the sizes and shares of time below are estimates for one of the class of an H200. Look at the
# first lines of every stage and change them by environment variables.
#
#   text     the target writes conversations with its laws, many at a time            TEXT_S seconds
#   tables   tables from them, on the CPU, while the accelerator goes on              (until the head is trained)
#   probe    a few steps of training, which say how many fit in the time              PROBE_S
#   head     an EAGLE-3 head, its output the target's own rows                        TRAIN_S
#   worth    tables, head and their cascade decode held-out prompts                   EVAL_S
#   drafter  the better of the two in bfloat16, in $OUT/drafter
#
# A stage that has used up its share is interrupted. What it has done is kept: text so far is what is trained on, a head
# goes on from its last checkpoint when the same command is given again, and until then the tables are the drafter.
# Stages that are done are not done again. The target must be in the cache if the machine has no network
# (SPECJAX_CACHE, or TARGET=directory). Needs bash, coreutils and the extra `train`.
set -euo pipefail
cd "$(dirname "$0")/.."

began=$SECONDS
TOY=${TOY:-0}
OUT=${OUT:-runs/accelerator}
PYTHON=${PYTHON:-python}
mkdir -p "$OUT/stages"

if [ "$TOY" = 1 ]; then  # a tiny target without tokenizer, which reads random texts; everything else is the same
    export JAX_PLATFORMS=cpu
    TARGET=${TARGET:-tests/data/tiny_models/llama3_rope_scaled}
    : "${DTYPE:=float32}" "${TOKENS:=3k}" "${ROWS:=8}" "${SLOTS:=24}" "${BATCH:=2}" "${WIDTH:=16}" "${EPOCHS:=0.05}"
    : "${DRAFT_VOCAB:=40}" "${PROBE_STEPS:=4}" "${MEGABYTES:=1}" "${NEW_TOKENS:=8}" "${DEPTH:=2}" "${SAVE_EVERY:=2}"
    : "${MARK:=1}" "${TEXT_S:=300}" "${PROBE_S:=300}" "${TRAIN_S:=300}" "${EVAL_S:=300}"
    : "${TEMPERATURES:=0}" "${EVAL_BATCH:=8}"
    TEXT=${TEXT:-$OUT/text.npz} PROMPTS=${PROMPTS:-$OUT/prompts.jsonl}
    "$PYTHON" scripts/accelerator_stages.py toy "$TARGET" "$TEXT" "$PROMPTS"
fi
TARGET=${TARGET:-smollm2-135m-instruct} DTYPE=${DTYPE:-bfloat16}
TEXT=${TEXT:-} PROMPTS=${PROMPTS:-} SPLIT=${SPLIT:-all}  # of --text; prompts that are decoded at the end
TOKENS=${TOKENS:-24M} ROWS=${ROWS:-1024} SLOTS=${SLOTS:-320}  # wanted, if there is time for them; conversations at once
BATCH=${BATCH:-64} WIDTH=${WIDTH:-256} EPOCHS=${EPOCHS:-2} STEPS=${STEPS:-}  # STEPS: no probe
LEARNING_RATE=${LEARNING_RATE:-1e-3} DEPTH=${DEPTH:-3} DRAFT_VOCAB=${DRAFT_VOCAB:-8192} SAVE_EVERY=${SAVE_EVERY:-200}
PROBE_STEPS=${PROBE_STEPS:-40} MARK=${MARK:-10} MEGABYTES=${MEGABYTES:-12} LIMIT=${LIMIT:-16000000}
NEW_TOKENS=${NEW_TOKENS:-64} TEMPERATURES=${TEMPERATURES:-0 1} EVAL_BATCH=${EVAL_BATCH:-8} WALL=${WALL:-0}
TEXT_S=${TEXT_S:-270} PROBE_S=${PROBE_S:-90} TRAIN_S=${TRAIN_S:-200} EVAL_S=${EVAL_S:-110}

elapsed() { echo "[$((SECONDS - began)) s] $*"; }
die() { elapsed "$*" >&2; exit 1; }
finished() { [ -e "$OUT/stages/$1" ]; }

# stage NAME SECONDS COMMAND..: at most so long; says how long. 0: it ended, 1: its time was used up.
stage() {
    local name=$1 limit=$2 start=$SECONDS code=0
    shift 2
    elapsed "$name: at most $limit s"
    # A script in the background of another ignores Ctrl-C's signal, and so would Python: hence env.
    timeout --foreground --signal=INT --kill-after=30 "$limit" env --default-signal=INT "$@" || code=$?
    case $code in
        0) touch "$OUT/stages/$name"; elapsed "$name: done in $((SECONDS - start)) s" ;;
        124 | 137) elapsed "$name: its $limit s are used up"; return 1 ;;
        *) elapsed "$name failed with status $code"; exit "$code" ;;
    esac
}

text=(--target "$TARGET" --dtype "$DTYPE" --corpus "$OUT/corpus" --rows "$ROWS" --slots "$SLOTS")
[ -z "$TEXT" ] || text+=(--text "$TEXT")
look=(--max-new-tokens "$NEW_TOKENS" --repeats 0)
[ "$TOY" = 0 ] || look+=(--eval-prompts "$PROMPTS")
student=(--student eagle3 --target-head --batch "$BATCH" --width "$WIDTH" --depth "$DEPTH" --draft-vocab "$DRAFT_VOCAB"
    --learning-rate "$LEARNING_RATE" --save-every "$SAVE_EVERY" --log-every "$MARK")
[ "$DTYPE" != bfloat16 ] || student+=(--compute bfloat16)

if ! finished text; then
    stage text "$TEXT_S" "$PYTHON" scripts/accelerator_stages.py text "${text[@]}" --tokens "$TOKENS" || true
    compgen -G "$OUT/corpus/shard-*.npz" > /dev/null ||
        die "no text was complete after $TEXT_S s: raise TEXT_S, or lower ROWS ($ROWS)"
    touch "$OUT/stages/text"
fi
# From here on the text is what it is: asking for one token writes no more of it.
text+=(--tokens 1)

tables=
if ! finished tables; then
    JAX_PLATFORMS=cpu stage tables $((PROBE_S + TRAIN_S)) "$PYTHON" scripts/distill_draft.py --student tables \
        --megabytes "$MEGABYTES" --out "$OUT/tables" "${text[@]}" "${look[@]}" > "$OUT/tables.log" 2>&1 &
    tables=$!
    # What ends this script ends them too, and waits.
    trap 'kill -INT $(pgrep -P "$tables") 2> /dev/null || true; wait' EXIT
fi

if [ -n "$STEPS" ]; then
    echo "$STEPS" > "$OUT/steps"
elif [ ! -e "$OUT/steps" ]; then
    start=$SECONDS
    stage probe "$PROBE_S" "$PYTHON" scripts/distill_draft.py "${student[@]}" --steps "$PROBE_STEPS" \
        --out "$OUT/probe" "${text[@]}" "${look[@]}" ||
        die "$PROBE_STEPS steps did not fit in $PROBE_S s: raise PROBE_S, or lower BATCH"
    "$PYTHON" scripts/accelerator_stages.py steps "$OUT/probe/training/metrics.jsonl" "$OUT/corpus" \
        --wall $((SECONDS - start)) --seconds "$TRAIN_S" --epochs "$EPOCHS" --batch "$BATCH" --width "$WIDTH" \
        > "$OUT/steps.part"
    mv "$OUT/steps.part" "$OUT/steps"
fi
steps=$(cat "$OUT/steps")
if ! finished head; then
    stage head "$TRAIN_S" "$PYTHON" scripts/distill_draft.py "${student[@]}" --steps "$steps" --out "$OUT/head" \
        "${text[@]}" "${look[@]}" || elapsed "head: not trained to its end, step $steps; give the same command again"
fi

if [ -n "$tables" ]; then
    wait "$tables" || { tail -n 20 "$OUT/tables.log" >&2; die "no tables: see $OUT/tables.log"; }
    trap - EXIT
    tail -n 3 "$OUT/tables.log"
fi
drafters=("$OUT/tables")
if finished head; then
    [ -d "$OUT/small" ] || "$PYTHON" scripts/accelerator_stages.py small "$OUT/head" "$OUT/small"
    drafters+=("$OUT/small" "$OUT/tables+$OUT/small")
fi

if ! finished worth || [ "${#drafters[@]}" -gt 1 ] && ! grep -qsF "$OUT/small" "$OUT/worth.json"; then
    command=("$PYTHON" scripts/eval_drafter.py ${PROMPTS:+"$PROMPTS"} --split "$SPLIT" --model "$TARGET")
    command+=(--dtype "$DTYPE" --drafter "${drafters[@]}")
    [ "$WALL" = 0 ] || command+=(--wall)
    # shellcheck disable=SC2206 # temperatures are words
    command+=(--batch "$EVAL_BATCH" --max-new-tokens "$NEW_TOKENS" --json "$OUT/worth.json" --temperature $TEMPERATURES)
    stage worth "$EVAL_S" "${command[@]}" || true
fi

best=$("$PYTHON" scripts/accelerator_stages.py better "$OUT/worth.json" "${drafters[@]:0:2}")
rm -rf "$OUT/drafter.part"
cp -r "$best/drafter" "$OUT/drafter.part"
rm -rf "$OUT/drafter"
mv "$OUT/drafter.part" "$OUT/drafter"
bytes=$(find "$OUT/drafter" -type f -printf '%s\n' | awk '{ total += $1 } END { print total }')
elapsed "drafter: $best in $OUT/drafter, $bytes bytes"
[ "$bytes" -le "$LIMIT" ] || die "more than $LIMIT bytes: lower MEGABYTES, or the size of the head"
finished head || die "the head is not trained to its end: give the same command again"
