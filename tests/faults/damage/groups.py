"""All kinds of damage to a checkpoint, by group and by name."""

from tests.faults.damage.files import FILES
from tests.faults.damage.headers import HEADERS
from tests.faults.damage.indexes import INDEXES
from tests.faults.damage.meaning import MEANING

GROUPS = {"Files": FILES, "Headers": HEADERS, "Index": INDEXES, "Meaning": MEANING}
CASES = {case.id: case for cases in GROUPS.values() for case in cases}
