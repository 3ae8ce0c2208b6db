"""What `verify blocks` was given: a checkpoint or shards, opened, and which layers to check."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from k3tool.blocks.check import Model, embedded
from k3tool.checkpoint.reader import Checkpoint
from k3tool.errors import ArtifactError, UsageError
from k3tool.model.config import K3Config
from k3tool.runtime.cache import Source, open_source
from k3tool.runtime.options import RunOptions


@contextlib.contextmanager
def opened(
    folders: Sequence[Path], against: Path | None, prompt: Sequence[int] | None
) -> Iterator[Model]:
    """Open a model; `against` holds the reference's weights, else they are the model's own.

    Raises: ArtifactError for what cannot be read, and for two of other configs or degrees;
    UsageError for ids that the vocabulary has not.
    """
    with contextlib.ExitStack() as stack:
        source = _source(folders)
        ranks = _ranks(source, stack)
        references = ranks
        if against is not None:
            other = _source((against,))
            references = _ranks(other, stack)
            if other.config != source.config:
                raise ArtifactError(
                    str(against), got="another config", need=f"that of {folders[0]}"
                )
            if len(references) not in (1, len(ranks)):
                need = f"a checkpoint, or shards of {len(ranks)} ranks"
                raise ArtifactError(str(against), got=f"{len(references)} ranks", need=need)
        table = None if prompt is None else embedded(references[0], prompt)
        yield Model(str(folders[0]), source.config, ranks, references, table)


def _source(folders: Sequence[Path]) -> Source:
    return open_source(RunOptions(folders[0], (0,), 1, beside=tuple(folders[1:])))


def _ranks(source: Source, stack: contextlib.ExitStack) -> list[Checkpoint]:
    if source.checkpoint is not None:
        return [stack.enter_context(source.checkpoint)]
    assert source.shards is not None
    return [stack.enter_context(source.shards.rank(rank)) for rank in range(source.shards.tp)]


def chosen_layers(config: K3Config, layers: Sequence[int] | None) -> tuple[int, ...]:
    """Return the layers to check: those given, else the first of each kind and the last.

    Raises: UsageError for a layer that the model has not.
    """
    if layers is None:
        kinds: dict[tuple[bool, bool], int] = {}
        for layer in config.layers:
            kinds.setdefault((config.is_mla(layer), config.is_moe(layer)), layer)
        return tuple(sorted({*kinds.values(), config.layers[-1]}))
    beyond = [layer for layer in layers if layer not in config.layers]
    if beyond:
        raise UsageError("--layers", got=beyond[0], need=f"0 to {config.layers[-1]}")
    return tuple(layers)
