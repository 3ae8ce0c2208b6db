"""Write into a tensor of a checkpoint where it lies: its file keeps its size and its header."""

from pathlib import Path

from k3tool.checkpoint.reader import Checkpoint


def put(folder: Path, name: str, index: tuple[int, ...] | slice, value: object) -> None:
    """Set elements of a tensor: of bf16 their bits."""
    with Checkpoint.open(folder) as checkpoint:
        info, array = checkpoint.tensor_info(name), checkpoint.read(name)
    array[index] = value
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(array.tobytes())
