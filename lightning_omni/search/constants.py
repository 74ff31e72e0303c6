"""Every number that the tuner decides by: a table in ``docs/tuning-prior.md`` says where each comes from."""

from __future__ import annotations

FEWEST_BATCHES, MOST_BATCHES = 4, 40
"""Batches of each worker in a probe."""
MOST_PROBES = 16
"""Probes in a search."""
PROBES, STEP_PROBES = 7, 3
"""Into so many probes a budget is cut, if they do not get too short or too long."""
STEP_SHARE = 0.3
"""A probe of a search for the step takes this part of its budget."""
TOLERATED = 1.25
"""Three probes of a run under way may take so much more than was reserved: two of them would be of no use."""
WORTH = 0.08
"""A search ends when the next probe is expected to find less than that, relative to the time to the target."""
FASTER = 1.05
"""More groups, proportional batches or an all-reduce format have to be that much faster to count; less is a tie."""
CLEARLY = 4.0
"""Speeds differ if their mean squared deviation is that many times its expectation under noise alone."""
LOST, NOISY, SCATTERED = 0.5, 0.2, 1.0
"""A run is lost when this part of what its probe gained is gone, and the loss is higher by at least this part of it,
and by so many standard deviations of the losses of single batches."""
GAIN = 1.1
"""A run under way changes its groups only for an expected speed-up of that much."""
PAYS, DARES = 0.036, 0.057
"""A smaller and a larger step have to lower the loss at once by these parts of what was learnt so far."""
ABOVE = 0.12
"""Groups whose loss is above that of one group by more than this part, with the same steps, are diverging."""
RISE = 0.05
"""A loss that is higher at the end of a probe than at its beginning by more than this part has risen."""
SMALLER = 3.0
"""By what a step is divided, or multiplied."""
SMALLER_TIMES = 4
"""How often a step is made smaller, if nothing else does not diverge."""
CAUTION = 0.25
"""How many standard deviations of the forecast count against a setting when one is chosen."""
POINTS = 600
"""Points at which the acquisition function is computed."""
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
BUDGET_PART = 0.4
"""Of the budget for the search before the first batch, and as much for the first retuning of the run under way. More is
earned while the run trains: so a run that reaches its target early has not paid for all of its epochs."""
EARLY = 0.25
"""Up to this part of the run it counts as early: the steps that are best then are best for most of it."""
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
