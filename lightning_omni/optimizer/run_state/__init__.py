"""All that a run must remember, as one value in three scopes: the run, the group, and the rank's part of the model.

What happens to each piece when groups are formed, a rank dies, a group joins, a probe runs, a run is resumed, and in a
checkpoint, the table in ``docs/state.md`` says; its rows are the fields of the scopes here.

Rule 1: a `RunState` is a copy. The run has the objects themselves, and goes on with them.
Rule 2: what is put back is put back into these very objects, bitwise: others hold them, too.
"""

from lightning_omni.optimizer.run_state.group import GroupScope
from lightning_omni.optimizer.run_state.kept import Generators, Kept
from lightning_omni.optimizer.run_state.rollback import RollbackPoint
from lightning_omni.optimizer.run_state.run import RunScope
from lightning_omni.optimizer.run_state.shard import ShardScope
from lightning_omni.optimizer.run_state.state import Live, RunState

__all__ = ["Generators", "GroupScope", "Kept", "Live", "RollbackPoint", "RunScope", "RunState", "ShardScope"]
