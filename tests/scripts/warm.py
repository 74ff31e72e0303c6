"""Starts training scripts in copies of a process that has imported torch and Lightning, which takes eight seconds.

A run of pytest keeps one, and its processes send it a line of JSON for each script, with the file for its output. Each
script is run by a copy of its own, in a session of its own, with the environment that was asked for; this process says
which number the copy has and how it ended. See `runs.keep_warm` and `runs.Running`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import weakref

TORCHRUN = ["-m", "torch.distributed.run"]
CLONE_NEWNET = 0x40000000
"""Of Linux's sched.h."""
MADV_COLLAPSE = 25
"""Of Linux's mman.h, since 6.1; older ones refuse it, and go on with small pages."""
HUGE = 1 << 21
"""Bytes of a large page."""
HEAVY = ("pytorch_lightning", "torchmetrics", "skopt")
_ended: list[int] = []
"""The exit code, when a script has come to its end."""


def main() -> None:
    """Starts scripts and says how they end, until the process that began this one is gone; leaves no folder behind."""
    atexit.register(leave)  # before what torch and Lightning register, and so run after that
    begun, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    listening: list[socket.socket] = []
    started: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([begun, listener, *listening, *started], [], [])[0]:
            if ready is begun:
                shutil.rmtree(os.path.dirname(listener.getsockname()))
                return
            if ready is listener:
                listening.append(listener.accept()[0])
                continue
            if ready in started:
                tell_end(ready, *started.pop(ready))
                continue
            word, files, _, _ = socket.recv_fds(ready, 1 << 20, 2)
            if not word:
                listening.remove(ready)
                ready.close()
                continue
            import_all()
            output, said = files
            pid = os.fork()
            if pid == 0:
                for each in (begun, listener, *listening):
                    each.close()
                for number in (said, *started, *(told for _, told in started.values())):
                    os.close(number)
                become(json.loads(word), output)
                return
            os.close(output)
            with contextlib.suppress(BrokenPipeError):  # who has started it may be gone
                os.write(said, b"%d\n" % pid)
            started[os.pidfd_open(pid)] = pid, said


def tell_end(descriptor: int, pid: int, said: int) -> None:
    """Says to whoever has started a script that it has ended, and how."""
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(said, b"%d\n" % os.waitstatus_to_exitcode(status))
    os.close(descriptor)
    os.close(said)


def import_all() -> None:
    """What scripts need, once."""
    if "spares" in sys.modules:
        return
    gc.disable()  # what is imported stays: to look for garbage in it takes as long as to import it
    for name in (*HEAVY, "lightning_omni.cli.commands", "lightning_omni.transport.serving.__main__"):
        importlib.import_module(name)
    importlib.import_module("spares")
    gc.collect()
    gc.freeze()  # or every copy looks through all that was imported, and so has pages of its own: half of its work
    gc.enable()
    for each in list(weakref.finalize._registry):  # of torch's operators, which take a process 40 ms to take apart
        each.atexit = False
    use_huge_pages()


def use_huge_pages() -> None:
    """Has the kernel keep what was imported in pages of 2 MiB, where it can: of a copy they take half of the time."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, access, _, _, _, *file = line.split()
            begin, end = (int(each, 16) for each in addresses.split("-"))
            begin, end = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
            if access == "rw-p" and file in ([], ["[heap]"]) and begin < end:
                advise(begin, end - begin, MADV_COLLAPSE)


def become(job: dict, output: int) -> None:
    """This process is now that of the script."""
    import lightning_fabric.utilities.rank_zero as rank_zero
    import torch

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, kept in enumerate((nothing, output, output)):
        os.dup2(kept, number)
    os.close(output)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored, if the tests were started with that
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    tempfile.tempdir = None  # what the environment says
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0  # what Lightning reads when it is imported
    if network := os.environ.get("OMNI_TEST_NETWORK"):
        enter(network)
    sys.orig_argv[1:] = job["command"]
    if job["command"][:2] == TORCHRUN and "--no-python" not in job["command"]:
        prepare_workers(job["command"])
    elif job["command"][0] in ("-c", "-m") and "OMNI_TEST_COPIES" in os.environ:
        import spares

        spares.copy_when_asked()
    run(sys.orig_argv[1:])


def leave() -> None:
    """Leaves a process whose script has come to its end at once: to take all modules apart takes half a second."""
    if _ended:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        status = getattr(sys, "_lightning_omni_exit_status", None)
        os._exit(_ended[0] or (status.code if status is not None else 0))


def enter(network: str) -> None:
    """From here on this process, and whatever it starts, is in a network namespace, as by `ip netns exec`."""
    with open(f"/run/netns/{network}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no network namespace {network}")


def prepare_workers(torchrun: list[str]) -> None:
    """The workers that torchrun is to start are copies, too, and so are servers that the first of them starts."""
    import spares
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as elastic

    for name in [each for each in logging.root.manager.loggerDict if each.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(os.environ.get("LOGLEVEL", "WARNING"))  # which torch reads when it is imported
    ranks = [int(word.partition("=")[2]) for word in torchrun if word.startswith("--nproc-per-node=")]
    spares.prepare(ranks[0] if ranks else 0, servers=0)
    elastic.Popen = spares.Popen
    if "RANK" in os.environ:  # in one of them, which now is to go on as that
        sys.orig_argv[:] = [word for word in sys.orig_argv if word != "-u"]
        if os.environ["RANK"] == "0":
            spares.prepare(ranks=0, servers=int(os.environ.get("OMNI_TEST_SERVERS", "1")))


def run(command: list[str]) -> None:
    """As Python does with these arguments."""
    try:
        run_program(*command)
    except SystemExit as end:
        if not isinstance(end.code, (int, type(None))):
            raise
        _ended.append(end.code or 0)
        raise
    except Exception:  # which is printed on the way out; Ctrl-C ends a process in another way
        _ended.append(1)
        raise
    _ended.append(0)


def run_program(what: str, *rest: str) -> None:
    if what == "-m":
        sys.path[0], sys.argv = os.getcwd(), [*rest]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path[0], sys.argv = os.path.dirname(what), [what, *rest]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    main()
