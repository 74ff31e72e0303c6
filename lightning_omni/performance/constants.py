"""Every number that the models decide by. What each means and where it comes from is in ``docs/performance.md``."""

from __future__ import annotations

# --- Hardware efficiency (`profile`, `queueing`) ---------------------------------------------------------------------

QUANTILES = 64
"""Equally likely values by which a rank's jitter is represented."""
POOLED = 8.0
"""Jitter of all ranks counts as that many more steps of each."""
COMMON = 1e-3
"""How likely independent ranks are taken for ranks whose steps are long together."""
ALIKE = 0.05
"""Ranks whose speeds differ by no more than this part are not sorted by them."""
NOTICED = 0.1
"""Something else than the server holds exchanges up if it is busy for longer by more than this part."""
SHORTEST_EXCHANGE = 0.05
"""How much the shortest exchange counts, as one that did not wait, where nothing speaks against it."""
SLOPE_STEP = 1e-3
"""Step of the finite differences of a fit, as a part of the longest cycle."""
QUEUE_ROUNDS = 40
"""Rounds of the fixed point for the times that groups spend in queues, at most."""
QUEUE_TOLERANCE = 1e-6
"""Part of a cycle by which that fixed point may still change in the last round."""
QUEUE_STATES = 96
"""Numbers of groups at shared links for which queues are computed one group at a time; beyond it nearly."""
QUEUE_SCATTER = 0.2
"""How much small scatter counts near saturation."""
FORECAST_ERROR = 0.3
"""Standard deviation of the logarithm of what an exchange costs that is forecast from the all-reduce."""
BARRIER_CYCLES, BARRIER_CHAINS, BARRIER_SAMPLES = 16, 4, 512
"""Cycles that are played of groups that wait for one another, in how many runs, and in runs of how many groups once."""
OVERLAP_ROUNDS = 12
"""Rounds of the fixed point for exchanges that travel beside the computation."""
IDLE = 0.02
"""Part of the time that what groups share may be idle and yet be called always busy."""

# --- Statistical efficiency (`statistical`, `decay`) -----------------------------------------------------------------

FEWEST_POINTS, MOST_POINTS = 8, 256
"""Points of a loss curve: fewer are refused, of more the means of neighbours are taken."""
ENDS = 0.2
"""Part of a curve at either end that says whether it diverged."""
BROKEN = 0.1
"""Part of the losses that may be not finite, none of them at the end."""
RISEN = 4.0
"""Standard errors by which the end of a curve has to be above its beginning to have diverged."""
SPIKE_WINDOW, SPIKE = 7, 10.0
"""Points whose median a loss is compared with, and how many standard deviations it may be away from it."""
LITTLE_SKIPPED, MUCH_SKIPPED = 0.25, 0.5
"""Parts of a curve that are left out at its beginning where the whole does not follow one law."""
CORRELATED, LESS_CORRELATED = 2.0, 1.5
"""Autocorrelation time, in points, from which on this is tried; and by what it has to shrink for that to be taken."""
SHORTEST_DECAY, LONGEST_DECAY = 0.00001, 30.0
"""Time constants that are fitted, in lengths of the curve."""
LARGEST_BEND = 5.0
"""The slowest decay that is fitted, (1 + 5 t)^(-1/5)."""
GRID_NODES, GRID_ROUNDS = 25, 8
"""Nodes of the likelihood's grid in each direction, and how often it is narrowed at most."""
UNLIKELY = 8.0
"""Nodes whose log likelihood is that much below the best are left out where the grid is narrowed."""
CANDIDATES = 2000
"""Decays that represent the likelihood."""

# --- Momentum (`momentum`) -------------------------------------------------------------------------------------------

LEAST_SPREAD, MOST_SPREAD = 0.5, 1.5
"""Standard deviations of staleness, relative to a geometric one of that mean, between which it acts as momentum."""

# --- Forecast (`forecast`) -------------------------------------------------------------------------------------------

BLOCKS, TAIL = 8, 3
"""The losses of a run's first batches are averaged over so many equal segments; the last few say where it is."""
THEORY_ERROR = 0.25
"""Standard deviation of what theory is off by, in logarithms, where there is no prior."""

# --- Splits of a batch, and what is said of a step (`batch_split`, `step_parts`) -------------------------------------

SPLIT_WARM_UP = 5
"""Batches that are left out at first: memory is allocated, kernels are chosen, caches are filled."""
SPLIT_WINDOW, SPLIT_FEWEST = 20, 3
"""Batches whose median is a rank's speed, at most and at least."""
SPLIT_GAIN, SPLIT_AT_ONCE = 0.05, 0.25
"""A split is changed if the group's step gets faster by more than this part, seen twice; beyond the other, at once."""
STRAGGLER, STRAGGLER_SECONDS = 1.5, 0.005
"""A straggler works that many times as long as the rest of its group, and so many seconds more."""
