#!/usr/bin/env bash
# The whole story: a checkpoint in the released layout goes in, tokens from eight ranks come out.
# Usage: samples/pipeline.sh OUT_FOLDER   (k3tool on the PATH; `make demo` does both)
set -euo pipefail
out=${1:?usage: samples/pipeline.sh OUT_FOLDER}
rm -rf "$out" && mkdir -p "$out"

step() { # show a command as a person would type it, then run it
  printf '\n$ %s\n' "$*"
  "$@"
}

# A synthetic checkpoint: the release's files, names and dtypes at a size that fits a laptop.
step k3tool sample "$out/ckpt"
# Is it whole? Index, headers, config and what the engine will read are joined.
step k3tool inspect "$out/ckpt"
# Cut for eight ranks. Every byte lands on a rank, is replicated on purpose, or is named as dropped.
step k3tool shard "$out/ckpt" --tp 8 -o "$out/shards"
# Operator graph, fusions, schedule, counters and memory map.
step k3tool compile-plan "$out/shards" -o "$out/plan.h5"
# 64-byte instructions and every rank's queues.
step k3tool emit-isa "$out/plan.h5" -o "$out/isa.h5"
# What plan and streams prove about themselves, and that nothing in the checkpoint goes unread.
step k3tool verify plan "$out/plan.h5" "$out/isa.h5"
step k3tool verify coverage "$out/isa.h5" --weights "$out/shards"
# Eight rank processes, one stream, tokens as they come. Its summary, on stderr, is kept for the end.
{ step k3tool run "$out/shards" --isa "$out/isa.h5" --ids 1,2,3 --gen 32 --ignore-eos \
    -o "$out/tokens.h5" 2>&1 >&3 | tee "$out/run.log" >&2; } 3>&1
# All ranks produced the same tokens from the same bits.
step k3tool verify ranks "$out/tokens.h5"

printf '\nbuilt in %s:' "$out"
for name in ckpt shards plan.h5 isa.h5 tokens.h5; do
  printf ' %s (%s)' "$name" "$(du -sh --apparent-size "$out/$name" | cut -f1)"
done
printf '\n%s\n' "$(tail -n 1 "$out/run.log")"
