"""`k3tool bench`: measurements and models, each number with what it was made from beside it.

One file a subcommand. To add one: a file with `command` (click) and `run(options)`, and its line in
`SUBCOMMANDS`. What measures lives in k3tool/bench; nothing heavy is imported before a command runs.
"""

import click

from k3tool.progress import waiting
from stages.bench import (
    budgets,
    cache,
    chain,
    decode,
    gemv,
    handoff,
    inspect_checkpoint,
    io,
    long_run,
    prefill,
    report,
    roofline,
    shard,
    simulate,
)
from stages.refusals import Commands

SUBCOMMANDS = (
    chain.command,
    simulate.command,
    inspect_checkpoint.command,
    shard.command,
    roofline.command,
    decode.command,
    prefill.command,
    handoff.command,
    gemv.command,
    io.command,
    cache.command,
    budgets.command,
    long_run.command,
    report.command,
)


@click.group("bench", cls=Commands)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure, with the definition beside each number.

    \b
    Example:
      k3tool bench chain plan.h5
      k3tool bench simulate isa.h5 --seeds 8
      k3tool bench roofline config.json --tp 8 --device MI355X
      k3tool bench decode CKPT
      k3tool bench prefill CKPT
      k3tool bench handoff
      k3tool bench gemv
      k3tool bench inspect --values
      k3tool bench shard --folder /mnt/nvme
      k3tool bench io CKPT --depth 4
      k3tool bench cache experts.trace
      k3tool bench budgets CKPT
      k3tool bench long CKPT
      k3tool bench report decode.json plan.h5 -o report.html
    """
    ctx.with_resource(waiting(f"bench {ctx.invoked_subcommand}"))  # until the subcommand has ended


for _subcommand in SUBCOMMANDS:
    command.add_command(_subcommand)
