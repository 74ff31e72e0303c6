"""Python reads this when a process of a test starts, of which there are hundreds. What takes them long, and none needs:

torchmetrics imports scipy.signal (0.7 s), and torch's optimizers import its compiler (1.2 s). Ranks have the compiler
anyway, through Lightning; the parameter server, which compiles nothing, gets an empty one.

With OMNI_TEST_ACCELERATOR=gpu all but the parameter server, which is started without devices, have emulated ones. They
must be there before torch is imported.
"""

import os
import sys
import types

unused = types.ModuleType("scipy.signal")
unused.hamming = unused.windows = None  # what torchmetrics looks for
sys.modules["scipy.signal"] = unused

if "lightning_omni.transport.serving" in sys.orig_argv:
    compiler = types.ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda *_: None
    sys.modules["torch._dynamo"] = compiler

if os.environ.get("OMNI_TEST_ACCELERATOR") == "gpu" and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.path.append(os.path.join(os.path.dirname(os.path.dirname(__file__)), "accelerator"))
    import emulated_cuda

    assert emulated_cuda.LIBRARY.exists()
