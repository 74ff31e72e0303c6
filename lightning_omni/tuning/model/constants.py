"""All constants of the models. ``docs/contribute/performance.md`` states the meaning and the source of each."""

from __future__ import annotations

# --- Hardware efficiency (`profile`, `queueing`) ----------------------------------------------------------------------

QUANTILES = 64
"""Number of equally likely values that represent a rank's jitter."""
POOLED = 8.0
"""Weight of the pooled jitter of all ranks in the jitter of each, in steps."""
COMMON = 1e-3
"""Significance level above which the ranks of a group count as independent, not as slow in the same steps."""
ALIKE = 0.05
"""Relative difference of speeds that is not worth a change: up to it, ranks are not sorted, and batches not split."""
QUEUE_ROUNDS = 40
"""Largest number of rounds of the fixed-point iteration for the time of groups in queues."""
QUEUE_TOLERANCE = 1e-6
"""Change in the last round of this iteration, as a fraction of a cycle, at which it stops."""
QUEUE_STATES = 96
"""Largest number of population vectors at shared links for which queues are computed exactly."""
QUEUE_SCATTER = 0.2
"""Scatter, in service times, that halves the queue of random arrivals at saturation."""
FORECAST_ERROR = 0.3
"""Standard deviation of the log error of an exchange's cost that is forecast from the all-reduce."""
BARRIER_CYCLES, BARRIER_CHAINS, BARRIER_SAMPLES = 16, 4, 512
"""Simulated cycles of groups that wait for each other, number of chains, and chains times groups of the precise run."""
OVERLAP_ROUNDS = 12
"""Rounds of the fixed-point iteration for exchanges that overlap computation."""

# --- First losses (`measurements`) ------------------------------------------------------------------------------------

BLOCKS, TAIL = 8, 3
"""Equal segments over which a run averages its first losses, and the number of last ones that give its current loss."""

# --- Splits of a batch, and stragglers (`steps`) ----------------------------------------------------------------------

SPLIT_WARM_UP = 5
"""Number of first batches to skip."""
SPLIT_WINDOW, SPLIT_FEWEST = 20, 3
"""Largest and smallest number of batches in the median of a rank's speed."""
SPLIT_AT_ONCE = 0.25
"""Relative gain in a group's speed that changes a split at once; a gain above `ALIKE` does when it is seen twice."""
STRAGGLER, STRAGGLER_SECONDS = 1.5, 0.005
"""Ratio to the compute time of the rest of its group, and excess in seconds, above which a rank is a straggler."""
