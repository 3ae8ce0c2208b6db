"""Any text is a listing or is refused in one line: random edits of a real one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3tool.errors import ArtifactError
from k3tool.isa import wire
from k3tool.isa.assemble import assemble
from tests.isa import plans
from tests.isa.test_assemble import listing

TEXT = "\n".join(listing(plans.plan()))
PIECES = ["", " ", "\n", "=", "%", "0", "-1", "99999999999", "0x", "wait=[", "]", ";", "nan", "é",
          "slices=", "p4294967296", "RMSNORM", "flags=rearm+", "_", "1_0"]  # fmt: skip


@pytest.mark.fuzz
@given(st.text(max_size=200))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError):
        assemble(text.splitlines())


@pytest.mark.fuzz
@settings(max_examples=300)
@given(st.data())
def test_an_edited_listing_assembles_to_something_or_is_refused(data: st.DataObject) -> None:
    text = TEXT
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        end = at + data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.sampled_from(PIECES)) + text[end:]
    try:
        phases = assemble(text.splitlines())
    except ArtifactError:
        return
    for packets, waits in phases.values():
        assert wire.decode(wire.encode(packets, waits))[0].shape == packets.shape
