"""Python reads this when a rank of a test starts: torchmetrics imports scipy.signal, which no rank uses, for 0.7 s."""

import sys
import types

unused = types.ModuleType("scipy.signal")
unused.hamming = unused.windows = None  # what torchmetrics looks for
sys.modules["scipy.signal"] = unused
