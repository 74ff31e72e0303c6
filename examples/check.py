"""Run all examples shortened, the tutorial and the notebook; fail if one of them fails. ``make examples`` calls it.

python examples/check.py                       # all, in about five minutes on two cores
python examples/check.py resnet.py tutorial    # some
python examples/check.py --full tutorial       # not shortened
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich import print

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("fashion_mnist.py", "gpt_diloco.py", "lora.py", "merged_head.py", "resnet.py", "spot.py", "tabular.py")
START = ROOT / "docs" / "start"


def example(name: str, full: bool) -> Iterator[str]:
    """Run an example, and yield its output."""
    yield run([str(ROOT / "examples" / name), *([] if full else ["--short"])])


def tutorial(full: bool) -> Iterator[str]:
    """Run the script of the tutorial after each of its three steps, and yield the outputs."""
    page = (START / "tutorial.md").read_text(encoding="utf-8")
    script, groups, report, tuner, append = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    if not full:
        script = script.replace("max_epochs=20", "max_epochs=1, limit_train_batches=8").replace(
            "devices=4", "devices=2"
        )
        groups = groups.replace("groups=4", "groups=2")
    with_groups = replaced(script, "strategy = DDPStrategy()\n", groups) + report
    with_tuner = replaced(script, "strategy = DDPStrategy()\n", tuner) + report
    with_tuner = replaced(with_tuner, "trainer = Trainer(\n", f"{append}trainer = Trainer(\n")
    with tempfile.TemporaryDirectory() as folder:
        for step in (script, with_groups, with_tuner):
            path = Path(folder, "train.py")
            path.write_text(step, encoding="utf-8")
            output = run([str(path)], folder)
            if " after " not in output:
                raise RuntimeError(f"the tutorial's script printed no result:\n{output}")
            yield output


def replaced(text: str, old: str, new: str) -> str:
    """Replace the one occurrence of a text."""
    if text.count(old) != 1:
        raise RuntimeError(f"the tutorial's script has {text.count(old)} lines {old!r}")
    return text.replace(old, new)


def notebook(full: bool) -> Iterator[str]:
    """Execute the notebook, and yield the text of its outputs."""
    import jupytext
    import nbclient

    pages = jupytext.read(START / "notebook.md")
    if not full:
        for cell in pages.cells:
            cell.source = cell.source.replace("max_epochs=6", "max_epochs=1").replace(
                "Limits(epochs=4)", "Limits(epochs=1)"
            )
            cell.source = cell.source.replace("devices=4", "devices=2")
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(pages, timeout=300, resources={"metadata": {"path": folder}}).execute()
    shown = [each for cell in pages.cells if cell.cell_type == "code" for each in cell.outputs]
    kinds = {kind for each in shown for kind in each.get("data", {})}
    if missing := {"text/html", "image/png"} - kinds:
        raise RuntimeError(f"the notebook shows no {sorted(missing)}")
    for each in shown:
        yield each.get("text", "") or each.get("data", {}).get("text/plain", "") + "\n"


def ray_train(full: bool) -> Iterator[str]:
    """Run the example for Ray Train, and yield its output; fail if a worker's death has cost more than its group."""
    output = run([str(ROOT / "examples" / "ray_train.py"), *([] if full else ["--short"])])
    elastic = output.partition("replaced one by one")[2]
    processes = set(re.findall(r"worker (\d), process (\d+): trains", elastic))
    if sorted(worker for worker, _ in processes) != ["0", "1", "1"]:
        raise RuntimeError(f"only worker 1 should have been started a second time:\n{output}")
    *_, last = re.findall(r"in epoch (\d+)$", elastic, re.MULTILINE)
    if sum(map(int, re.findall(rf"trained (\d+) batches in epoch {last}$", elastic, re.MULTILINE))) != 100:
        raise RuntimeError(f"the batches of the last epoch do not add up to 100:\n{output}")
    yield output


def run(command: list[str], folder: str | Path = ROOT) -> str:
    """Run a script, and return its output."""
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def main() -> None:
    """Run the named checks, or all, and exit with status 1 at the first that fails."""
    checks: dict[str, Callable[[bool], Iterator[str]]] = {
        "ray_train.py": ray_train,
        "tutorial": tutorial,
        "notebook": notebook,
    }
    parser = argparse.ArgumentParser(description="Run the examples, the tutorial and the notebook, shortened.")
    parser.add_argument("names", nargs="*", metavar="NAME", default=[*EXAMPLES, *checks], help="by default all")
    parser.add_argument("--full", action="store_true", help="do not shorten them")
    parser.add_argument("--show", action="store_true", help="print their output")
    arguments = parser.parse_args()
    for name in arguments.names:
        began = time.perf_counter()
        try:
            for output in checks[name](arguments.full) if name in checks else example(name, arguments.full):
                if arguments.show:
                    sys.stdout.write(output)
                    sys.stdout.flush()
        except Exception as error:
            sys.exit(f"{name}: {error}")
        print(f"{name:20}{time.perf_counter() - began:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
