#!/usr/bin/env bash
# The whole story: a checkpoint in the released layout goes in, tokens from eight ranks come out.
# Usage: samples/pipeline.sh OUT_FOLDER   (k3tool on the PATH; `make demo` does both)
set -euo pipefail
out=${1:?usage: samples/pipeline.sh OUT_FOLDER}
rm -rf "$out" && mkdir -p "$out"

step() { # show a command as a person would type it, then run it
  printf '\n\033[1m$ %s\033[0m\n' "$*" | { [ -t 1 ] && cat || sed 's/\x1b\[[0-9]*m//g'; }
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
# What the plan proves about itself, and that nothing in the checkpoint goes unread.
step k3tool verify plan "$out/plan.h5"
step k3tool verify coverage "$out/isa.h5" --weights "$out/shards"
# Eight rank processes, one stream, tokens as they come.
step k3tool run "$out/shards" --isa "$out/isa.h5" --ids 1,2,3 --gen 32 --ignore-eos -o "$out/tokens.h5"
# All ranks produced the same tokens, and the same bits.
step k3tool verify ranks "$out/tokens.h5"

printf '\nbuilt in %s: ' "$out" && du -sh --apparent-size "$out"/* | awk '{ printf "%s%s (%s)", sep, $2, $1; sep = ", " } END { print "" }'
