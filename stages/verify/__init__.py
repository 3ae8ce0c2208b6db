"""`k3tool verify`: one line per check, a verdict, exit code 4 unless all that ran passed.

One file a subcommand. To add one: a file with `command` (click) and `run(options)`, and its line in
`SUBCOMMANDS`. What compares lives in k3tool.
"""

import click

from k3tool.progress import waiting
from stages.refusals import Commands
from stages.verify import blocks, coverage, logits, plan, ranks, trace

SUBCOMMANDS = (
    ranks.command,
    logits.command,
    plan.command,
    coverage.command,
    trace.command,
    blocks.command,
)


@click.group("verify", cls=Commands)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Compare token streams, logits, results and layers; check plans, weights and handlers.

    One line per check: PASS, FAIL or NOT RUN. Nothing compared is a failure.

    \b
    Example:
      k3tool verify ranks tokens-tp8.h5
      k3tool verify logits logits.npz reference.npz
      k3tool verify plan plan.h5
    """
    ctx.with_resource(waiting(f"verify {ctx.invoked_subcommand}"))  # until the subcommand has ended


for _subcommand in SUBCOMMANDS:
    command.add_command(_subcommand)
