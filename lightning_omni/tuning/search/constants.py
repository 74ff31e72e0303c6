"""The constants of the tuner's decisions; a table in ``docs/contribute/constants.md`` states the origin of each."""

from __future__ import annotations

FASTER = 1.05
"""Factor by which more groups, proportional batches or an all-reduce format must be faster; a smaller gain is a tie."""
CLEARLY = 4.0
"""Ranks differ in speed if their mean squared deviation is more than this multiple of that under noise alone."""
LOST, CLEAR_CHANGE = 0.5, 0.2
"""A run has diverged if its loss exceeds the level of the first batches by the largest of three amounts: the first part
of the loss reduction in them, the second part of the level, and the standard deviation of single batches' losses. The
second part is also the relative fall of a loss that is not flat, the change of speed that causes a new search, and the
growth of the steps between two comparisons with the forecast."""
GAIN = 1.1
"""A run under way changes its groups only for an expected speed-up of at least this factor."""
CAUTION = 0.25
"""Standard deviations of a forecast that count against a setting when one is chosen."""
POINTS = 600
"""Points at which the acquisition function is evaluated."""
RATE_FACTOR = 3.0
"""scikit-optimize may propose learning rates between the prior's rate divided by this factor and the rate times it."""
FORMING = 0.5
"""Assumed seconds to form groups until the run has formed some."""
SEGMENT_ERROR = 0.02
"""Least standard deviation, in logarithms, of one segment as a prediction of the next one with the same setting."""
MOST_TRIED = 8
"""Combinations of values in user-defined dimensions that a run tries at most."""
SPEED_ERROR = 0.2
"""Standard deviation, in logarithms, of the hardware model's error for the speed of several groups, and of the effect
of another value in a user-defined dimension."""
NEAR_GROUPS, OTHER_WAY, OTHER_VALUE = 8.0, 0.5, 2.0
"""Distances between settings at which the model's errors have a correlation of exp(-1/2): a factor of groups; that of
periods is `LARGEST_PERIOD`. The last two are multiples of that distance: between settings that exchange in different
ways, and between settings with different values in a user-defined dimension."""
FIRST_DECISION, DECISIONS = 3, 5
"""Optimizer steps of a run before the first decision, which may only enable proportional batches; and the number of
decisions, each after twice as many steps as the one before. From the second one on, every setting is considered."""
WAITING_SHARE, FEW_RANKS = 0.01, 4
"""Part of a run's steps. Before it, a decision on more than proportional batches needs step times that scatter little,
unless it is the last decision, or no more than so many groups may form."""
LARGEST_PERIOD = 32
"""Most local steps between two exchanges that a search considers by default, in powers of two."""
RELATED = 0.3
"""Added in quadrature to the prior's standard deviation of a method that is judged by a relative or by the other kind
of optimizer; twice as much for a method that is judged by the costliest one."""
BEYOND, FARTHEST = 0.1, 2.0
"""Added to the prior's standard deviation for each interval between a setting and the end of the table; and intervals
over which costs are extrapolated linearly, after which they stay constant."""
LARGEST_STEP = 1.3
"""Largest step that the prior or scikit-optimize may suggest, relative to the user's own."""
LONGER, FLAT = 1.6, 0.05
"""A training loss is flat if, while the number of windows grew by the first factor, it fell by less than the second
part of the reduction since the start, and by less than `CLEAR_CHANGE` of itself."""
FEWEST_WINDOWS, LATE = 3, 0.2
"""Fewest windows for that decision; and the last part of the windows, over which the loss is averaged."""
SHORTEST_WINDOW = 50
"""Optimizer steps of all ranks after which a window ends inside an epoch; a shorter epoch is one window."""
TRIAL, FEWEST_STEPS, LAST = 0.05, 8, 0.4
"""A trial of the user's own setting takes this part of the samples trained so far, and at least this many steps; its
loss is the mean over this last part of it."""
LONGEST_TRIAL = 5
"""A trial whose loss still falls is extended, up to this multiple of its length."""
UNLIMITED = 10
"""Assumed epochs of a run without limits, unless twice the number of begun epochs is larger."""
FALSE_ALARM = 0.05
"""Probability that noise alone makes an unchanging run look changed, over any number of epochs."""
NON_FINITE_TOLERATED = 8
"""Non-finite pushes in a row after which a group gives up the epoch. As many non-finite losses in a row count as
divergence, too."""
NEWEST_LOSS = 0.05
"""Weight of the newest loss in the running mean that detects divergence."""
MESSAGES, CLEARLY_LONGER = 5, 10.0
"""Timed messages, of which the shortest counts; and the ratio to the time of an empty message above which a message's
time shows the cost of its bytes."""
OTHER_LINK = 3.0
"""Ratio of a message's time to that over the fastest link between consecutive nodes, above which the link leads to
another site."""
QUANTILE = 1.2816
"""Quantile of the normal distribution for intervals with a probability of 0.8."""
