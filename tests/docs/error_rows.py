"""Refusals as a set: what is wrong, and the command that provokes it, for docs/errors.md.

The exit code, the line and the hint are not written here: the test runs each row and compares with
the page. Rows stand under the exit code they must give.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One refusal. `shell`: run by bash, with a k3tool on PATH, because a shell makes the fault."""

    wrong: str
    command: str
    shell: bool = False


# How the folder was made in which the rows are run; every line is shown on the page, and run.
SETUP = """\
k3tool sample ckpt
k3tool sample other --seed 1
k3tool shard ckpt --tp 2 -o shards
k3tool compile-plan shards -o plan.h5
k3tool emit-isa plan.h5 -o isa.h5
k3tool run shards --isa isa.h5 --ids 1,2,3 --gen 8 --ignore-eos -o tokens.h5
k3tool run ckpt --ids 3,2,1 --gen 8 --ignore-eos -o other-prompt.h5 --save-state state.h5
k3tool compile-plan ckpt --tp 1 --eps l2norm=0.5 -o other-eps.h5
k3tool run ckpt --plan other-eps.h5 --ids 1,2,3 --gen 8 --ignore-eos -o other-eps-tokens.h5
cp -r ckpt missing; rm missing/model-00002-of-000011.safetensors
cp -r ckpt cut; truncate -s -8 cut/model-00002-of-000011.safetensors
cp -r ckpt no-field; sed -i /routed_scaling_factor/d no-field/config.json
cp -r ckpt not-a-number; printf '\\377\\177' | dd conv=notrunc oflag=seek_bytes seek=LM_HEAD \
of=not-a-number/model-00009-of-000011.safetensors
cp plan.h5 damaged.h5; printf x | dd conv=notrunc oflag=seek_bytes seek=5000 of=damaged.h5
cp -r shards edited; cp other/config.json edited/config.json; echo >> edited/config.json
cp -r shards half; rm -r half/rank-01-of-02
cp -r ckpt mute; rm mute/tiktoken.model mute/tokenizer_config.json
cp -r ckpt garbled; sed -i 300d garbled/tiktoken.model
echo '{"ids": [1], "generate": 2}' > requests.jsonl
mkdir empty
"""
# What no command can make: streams of another op table, which only another version writes.
STALE = "stale.h5"

USAGE = (
    Row("no such command", "k3tool inpsect ckpt"),
    Row("no such subcommand", "k3tool verify rank tokens.h5"),
    Row("an argument is missing", "k3tool bench decode"),
    Row("an argument too many", "k3tool inspect ckpt other"),
    Row("an option is missing", "k3tool emit-isa plan.h5"),
    Row("no degree to split to", "k3tool shard ckpt -o new"),
    Row("no such option", "k3tool inspect ckpt --layer 3"),
    Row("an option without its value", "k3tool run ckpt --ids 1 --gen"),
    Row("a switch with a value", "k3tool run ckpt --ids 1 --json=yes"),
    Row("a number out of its range", "k3tool run ckpt --ids 1 --gen 0"),
    Row("no number", "k3tool run ckpt --ids 1 --gen two"),
    Row("no such choice", "k3tool run ckpt --ids 1 --numerics f23"),
    Row("no ids", "k3tool run ckpt --ids 1,,2"),
    Row("an id that the model does not have", "k3tool run ckpt --ids 1,512"),
    Row("no prompt", "k3tool run ckpt"),
    Row("two prompts", "k3tool run ckpt --ids 1 --prompt Hello"),
    Row("a seed of nothing drawn", "k3tool run ckpt --ids 1 --seed 7"),
    Row("a line that is no request", "k3tool run ckpt --batch requests.jsonl"),
    Row("an answer that was not begun", "k3tool run ckpt --load-state state.h5 --chat"),
    Row("longer than the model reads", "k3tool run ckpt --ids 1 --gen 100000"),
    Row("a degree that does not divide", "k3tool shard ckpt --tp 3 -o new"),
    Row("another degree than the shards'", "k3tool run shards --ids 1 --tp 8"),
    Row("no degree", "k3tool compile-plan ckpt -o new.h5"),
    Row("another degree than the program's", "k3tool run ckpt --isa isa.h5 --ids 1 --tp 1"),
    Row("an unknown target", "k3tool run ckpt --ids 1 --target tpu"),
    Row("an unknown rule", "k3tool compile-plan ckpt --tp 1 --without nonsense -o new.h5"),
    Row("an unknown norm", "k3tool compile-plan ckpt --tp 1 --eps nonsense=1 -o new.h5"),
    Row("no such layer", "k3tool inspect ckpt --layers 99"),
    Row("no such rank", "k3tool disasm isa.h5 --rank 7"),
    Row("no size", "k3tool run ckpt --ids 1 --memory lots"),
    Row("two that exclude each other",
        "k3tool run ckpt --ids 1 --memory 1GB --preset laptop"),
    Row("an option that would be dropped", "k3tool run ckpt --ids 1 --storage-rate 3"),
    Row("a rate that no device has",
        "k3tool run ckpt --preset laptop --plan-only --storage-rate nan"),
    Row("an output over an input", "k3tool emit-isa plan.h5 -o plan.h5"),
    Row("an output that is something else", "k3tool emit-isa plan.h5 -o ckpt/config.json"),
    Row("an output in no folder", "k3tool run ckpt --ids 1 -o nowhere/tokens.h5"),
    Row("a folder that is there already", "k3tool sample ckpt"),
    Row("shards over something else", "k3tool shard ckpt --tp 2 -o other --force"),
    Row("a file against itself", "k3tool verify ranks tokens.h5 tokens.h5"),
    Row("nothing to measure", "k3tool bench io empty"),
)  # fmt: skip
ARTIFACT = (
    Row("no such folder", "k3tool inspect nowhere"),
    Row("a folder without a model", "k3tool inspect empty"),
    Row("a weight file is missing", "k3tool run missing --ids 1"),
    Row("a weight file was cut", "k3tool run cut --ids 1"),
    Row("a field is missing", "k3tool inspect no-field"),
    Row("no such tensor", "k3tool inspect ckpt --tensor nonsense"),
    Row("no such file", "k3tool emit-isa nothing.h5 -o new.h5"),
    Row("no such record", "k3tool verify ranks nothing.txt tokens.h5"),
    Row("a record of something else", "k3tool verify ranks ckpt/config.json tokens.h5"),
    Row("no tokenizer", "k3tool run mute --prompt Hello"),
    Row("a tokenizer with a line missing", "k3tool run garbled --prompt Hello"),
    Row("no artifact", "k3tool emit-isa ckpt/config.json -o new.h5"),
    Row("an artifact of another kind", "k3tool emit-isa isa.h5 -o new.h5"),
    Row("a damaged artifact", "k3tool emit-isa damaged.h5 -o new.h5"),
    Row("an artifact of another version", f"k3tool disasm {STALE}"),
    Row("streams of another checkpoint", "k3tool run other --isa isa.h5 --ids 1"),
    Row("weights of another checkpoint", "k3tool verify coverage isa.h5 --weights other"),
    Row("streams of another arithmetic",
        "k3tool run shards --isa isa.h5 --ids 1 --numerics bf16"),
    Row("a state of another checkpoint", "k3tool run other --load-state state.h5 --gen 2"),
    Row("a state of another arithmetic",
        "k3tool run ckpt --load-state state.h5 --gen 2 --numerics bf16"),
    Row("shards that were edited", "k3tool run edited --ids 1"),
    Row("a rank is missing", "k3tool run half --ids 1"),
    Row("one rank for all", "k3tool run shards/rank-00-of-02 --ids 1"),
    Row("answers to two questions", "k3tool verify ranks tokens.h5 other-prompt.h5"),
)  # fmt: skip
UNSOUND = (
    Row("a value that is no number", "k3tool run not-a-number --ids 1"),
    Row("streams that differ", "k3tool verify ranks tokens.h5 other-eps-tokens.h5"),
    Row("nothing to compare with", "k3tool verify ranks other-prompt.h5"),
    Row("a check that was not run, under --strict", "k3tool verify coverage isa.h5 --strict"),
    Row("shards that are not all there", "k3tool shard --check half ckpt"),
)
TARGET = (
    Row("no such device", "k3tool run ckpt --ids 1 --target hip:gfx950"),
    Row("less than the least memory", "k3tool run ckpt --ids 1 --memory 1MB"),
    Row("a limit on memory", "ulimit -v 300000; k3tool inspect ckpt", shell=True),
)
FAILED = (
    Row("a place that cannot be written", "k3tool sample /proc/new"),
    Row("a file too short to measure", "k3tool bench io ckpt/config.json --block 1000000"),
    Row("stdout is full", "k3tool isa > /dev/full", shell=True),
)
GROUPS = {1: FAILED, 2: USAGE, 3: ARTIFACT, 4: UNSOUND, 5: TARGET}
