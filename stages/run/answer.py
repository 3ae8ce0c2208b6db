"""How `run` answers: what is drawn, what ends it, and whether text or ids are printed."""

from dataclasses import dataclass

import click

from k3tool.errors import ArtifactError, incomplete
from k3tool.runtime.options import RunOptions, parse_ids
from k3tool.runtime.sampling import Sampler
from k3tool.text.reply import Reply
from k3tool.text.tokenizer import has_tokenizer
from stages import options as common
from stages.run.prompt import Prompt, Say, tokenizer_of

IDS, TEXT = "ids", "text"
_DRAWN = ("temperature", "top_p", "top_k", "seed")


def answer_options() -> common.Decorator:
    """Return the options that this module reads."""
    return common.together(
        click.option(
            "--temperature", type=float, metavar="T",
            help="Draw tokens, at this temperature. Default: 0, the best token each time.",
        ),
        click.option(
            "--top-p", type=float, metavar="P",
            help="With --temperature: draw from the fewest best tokens that together have this "
            "share.",
        ),
        click.option(
            "--top-k", type=int, metavar="K", help="With --temperature: draw from the K best."
        ),
        click.option(
            "--seed", type=int, metavar="N",
            help="With --temperature: one seed, the same tokens on every machine. Default: 0.",
        ),
        click.option(
            "--stop-id", multiple=True, metavar="N", help="Stop at this token too; repeatable."
        ),
        click.option(
            "--stop", multiple=True, metavar="TEXT",
            help="Stop before this text, wherever tokens divide it; repeatable.",
        ),
        click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end tokens."),
        click.option(
            "--show", type=click.Choice([TEXT, IDS]),
            help="Print text or token ids. Default: what the prompt is.",
        ),
        click.option(
            "-q", "--quiet", is_flag=True,
            help="Print the answer alone, nothing on stderr; not with --json or --verbose.",
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """The options as they were given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_id: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    show: str | None = None
    quiet: bool = False

    def sampler(self) -> Sampler:
        """Return how tokens are drawn. Raises: UsageError naming the option."""
        asked = {name: value for name in _DRAWN if (value := getattr(self, name)) is not None}
        if asked and "temperature" not in asked:
            option = "--" + next(iter(asked)).replace("_", "-")
            raise incomplete(option, "--temperature", "without one nothing is drawn")
        return Sampler(**asked)

    def stop_ids(self) -> tuple[int, ...]:
        """Return the ids of --stop-id. Raises: UsageError quoting what is none."""
        return tuple(token for word in self.stop_id for token in parse_ids(word, "--stop-id"))

    def is_text(self, ids: str | None) -> bool:
        """Return whether text is printed: what was asked for, else what came in."""
        return ids is None if self.show is None else self.show == TEXT

    def reply(
        self, prompt: Prompt, options: RunOptions, *, needs_text: bool, wants_text: bool, note: Say
    ) -> Reply | None:
        """Return what makes text of the answer's tokens; None where nobody needs it, or, where text
        is only wanted, where the model's folder has no tokenizer that can be read.

        Raises: ArtifactError for a tokenizer that is needed.
        """
        folder, tokenizer = options.source, prompt.tokenizer
        if tokenizer is None and (needs_text or self.stop):
            tokenizer = tokenizer_of(folder, options.cache)
        elif tokenizer is None and wants_text and has_tokenizer(folder):
            try:
                tokenizer = tokenizer_of(folder, options.cache)
            except ArtifactError as error:
                note(f"no text beside ids: {error.text()}")
        if tokenizer is None:
            return None
        if not prompt.before:
            return Reply(tokenizer, self.stop, prompt.channel)
        reply = Reply(tokenizer, self.stop, None if prompt.channel is None else "")
        reply.go_on(prompt.before)
        return reply
