"""Counts of a running service, in Prometheus' text form (version 0.0.4)."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

_Key = tuple[str, tuple[tuple[str, str], ...]]  # a series and its labels

# Name -> (kind, help). Every series has a row; an unknown name is a mistake in the code.
SERIES: Mapping[str, tuple[str, str]] = {
    "k3tool_requests_total": ("counter", "HTTP requests by path and status."),
    "k3tool_prompt_tokens_total": ("counter", "Prompt tokens of requests that were taken."),
    "k3tool_generated_tokens_total": ("counter", "Tokens that were generated."),
    "k3tool_generations_total": ("counter", "Generations by how they ended."),
    "k3tool_first_token_seconds_sum": ("counter", "Seconds from taking to the first token."),
    "k3tool_first_token_seconds_count": ("counter", "Generations that gave a first token."),
    "k3tool_active_sequences": ("gauge", "Sequences that hold a slot."),
    "k3tool_waiting_sequences": ("gauge", "Sequences that wait for a slot."),
    "k3tool_slots": ("gauge", "Sequences that the engine holds at once."),
}


class Metrics:
    """Counters that threads add to, and gauges that are asked when somebody reads."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._lock = threading.Lock()
        self._counts: dict[_Key, float] = defaultdict(float)
        self._gauges: dict[str, Callable[[], float]] = {}

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter. Raises: KeyError for a series that has no row."""
        if SERIES[name][0] != "counter":
            raise KeyError(name)
        with self._lock:
            self._counts[name, tuple(sorted(labels.items()))] += value

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Say how a gauge is read. Raises: KeyError for a series that has no row."""
        if SERIES[name][0] != "gauge":
            raise KeyError(name)
        self._gauges[name] = read

    def value(self, name: str, **labels: str) -> float:
        """Return a counter, 0 where nothing was added."""
        with self._lock:
            return self._counts.get((name, tuple(sorted(labels.items()))), 0.0)

    def text(self) -> str:
        """Return all series."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        with self._lock:
            counts = sorted(self._counts.items())
        for name, (kind, help_text) in SERIES.items():
            yield f"# HELP {name} {help_text}"
            yield f"# TYPE {name} {kind}"
            for (of, labels), value in counts:
                if of == name:
                    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
                    yield f"{name}{{{inside}}} {value:.17g}" if labels else f"{name} {value:.17g}"
            if name in self._gauges:
                yield f"{name} {self._gauges[name]():.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
