"""Python reads this when a process of a test starts, of which there are hundreds. What takes them long, and none needs:

torchmetrics imports scipy.signal (0.7 s), and torch's optimizers import its compiler (1.2 s). Ranks have the compiler
anyway, through Lightning; the parameter server, which compiles nothing, gets an empty one.
"""

import sys
import types

unused = types.ModuleType("scipy.signal")
unused.hamming = unused.windows = None  # what torchmetrics looks for
sys.modules["scipy.signal"] = unused

if "lightning_omni.server" in sys.orig_argv:
    compiler = types.ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda *_: None
    sys.modules["torch._dynamo"] = compiler
