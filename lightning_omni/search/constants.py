"""Every number that the tuner decides by: a table in ``docs/tuning-prior.md`` says where each comes from."""

from __future__ import annotations

FASTER = 1.05
"""More groups, proportional batches or an all-reduce format have to be that much faster to count; less is a tie."""
CLEARLY = 4.0
"""Speeds differ if their mean squared deviation is that many times its expectation under noise alone."""
LOST, NOISY, SCATTERED = 0.5, 0.2, 1.0
"""A run is lost when this part of what its first batches gained is gone, and the loss is higher by at least this part
of it, and by so many standard deviations of the losses of single batches."""
GAIN = 1.1
"""A run under way changes its groups only for an expected speed-up of that much."""
SMALLER = 3.0
"""By what steps are divided if one group diverges that makes other updates than the user's."""
CAUTION = 0.25
"""How many standard deviations of the forecast count against a setting when one is chosen."""
POINTS = 600
"""Points at which the acquisition function is computed."""
WIDEST = 3.0
"""Times the rate that the prior suggests, and the part of it, between which scikit-optimize may propose one."""
FORMING = 1.0
"""Seconds that forming groups is taken to need, as long as the run has formed none."""
SEGMENT_ERROR = 0.02
"""Standard deviation of what a segment says of the next one with the same setting, at least, in logarithms."""
MOST_TRIED = 8
"""Values in a user's own dimensions that are tried in a run."""
SPEED_ERROR = 0.2
"""Standard deviation of what the hardware model's speed of several groups is off by, in logarithms; and of what another
value in a dimension of a user's own may do to it."""
NEAR_GROUPS, NEAR_PERIOD, OTHER_WAY, OTHER_VALUE = 8.0, 32.0, 0.5, 2.0
"""How far settings are from each other when the model's errors for them have a correlation of exp(-1/2): factors for
groups and period; and how far apart those are, as a part of it, that exchange in other ways, or have another value in a
dimension of a user's own."""
FIRST_DECISION, DECISIONS = 3, 5
"""Optimizer steps of a run after which batches may be split by speed, if it is clear by then that this pays; and how
often it is decided, each time after twice as many, from the second time on by all that is known."""
UNHURRIED = 0.01
"""Part of a run's steps before anything is decided whose step times scatter, unless it is the last time anyway."""
LARGEST_PERIOD = 32
"""Local steps between two exchanges, in powers of two, that are thought of unless others are asked for."""
RELATED = 0.3
"""Added to the standard deviation of the prior, in squares, of a method that is judged by a relative; twice as much of
one that is judged by the worst of all."""
BEYOND, FARTHEST = 0.1, 2.0
"""Added to it for each interval of the prior's table that a setting lies beyond its end; and over how many intervals
the table is continued in a line, to stay level after that."""
LARGEST_STEP = 1.3
"""Times the user's own step that the prior may suggest. It was found on a grid of factors of √3, by which steps that
are closer than half of one cannot be told apart; and a step that is too large may never learn anything, however much
faster it is for most."""
LONGER, FLAT, STEEP = 1.6, 0.05, 0.2
"""A training loss is flat that has fallen, while the number of windows grew by the first factor, by less than the
second part of what was learnt since the start, and by less than the third part of itself."""
FEWEST_WINDOWS, LATE = 3, 0.2
"""Windows of which it can be told; and the part of them, the last ones, whose mean is what the loss is."""
SHORTEST_WINDOW = 50
"""Optimizer steps of all ranks after which a window ends inside an epoch; else it ends with the epoch."""
TRIAL, FEWEST_STEPS, LAST = 0.05, 8, 0.4
"""The user's own setting is tried with this part of the samples that were trained, and at least so many steps; the loss
of the last part of these counts."""
LONGEST_TRIAL = 5
"""A trial whose loss still falls is made longer, up to so many times."""
UNLIMITED = 10
"""Epochs that a run without limits is taken to train, or twice as many as it has begun if that is more."""
CHANGED, FALSE_ALARM = 0.2, 0.05
"""Speed that has changed by more than the first part is a reason to search again, and after so many more steps the run
is compared with its forecast again; and how likely noise alone may make a run that never changes look as if it
had, however many epochs it has."""
NON_FINITE_TOLERATED = 8
"""Non-finite pushes of a group that are tolerated in a row before it gives the epoch up. If so many losses in a row are
not finite the epoch was lost: groups with weights of their own may push finite ones in between."""
NEWEST_LOSS = 0.05
"""Weight of the newest loss in the running mean by which a run is seen to diverge."""
MESSAGES, CLEARLY_LONGER = 5, 10.0
"""Messages of which the shortest counts, for one may have waited for a rank that was late; and how many times as long
as an empty one a message takes that says what bytes take."""
OTHER_LINK = 3.0
"""How many times as long as over the fastest link between two nodes that follow each other a message takes to another
site."""
TIMED_PASSES, MOST_MERGEABLE = 3, 3
"""Passes of a submodule of which the shortest counts, for in the first one memory is allocated; and submodules of which
it is looked what merging them would gain, unless the user names some."""
