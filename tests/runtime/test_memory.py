import subprocess
import sys

SCRIPT = """
import gc
from ragkv.runtime import freeze_objects

class Node: pass

gc.disable()
old = Node()
freeze_objects()
assert old not in [one for one in gc.get_objects() if isinstance(one, Node)]
new = Node()
new.itself = new
del new
assert gc.collect() >= 1
print(gc.get_freeze_count() > 1000)
"""


def test_frozen_objects_are_left_out_of_collections_and_later_cycles_are_still_collected() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
