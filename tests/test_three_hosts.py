"""Three hosts with a launcher each train one run, with the commands that the page on joining shows."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import SLOWER
from runs import search_path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "studies"))

from emulated_network import CONGESTION, Hosts, Network, NoNamespacesError

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "joining.md"
START = SLOWER * 100.0
"""Seconds for six processes that import torch to have done so, and to train a little, on a busy machine."""
TRAIN = """
import json, os, sys, time
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_omni import OmniStrategy

FOLDER, GROUPS, EPOCHS, SAMPLES = Path({folder!r}), 3, 2, 192


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        (FOLDER / f"joined-{{os.getpid()}}").touch()
        while len(list(FOLDER.glob("joined-*"))) < {ranks}:  # all have come before the first batch is trained
            time.sleep(0.02)
        x, number = batch
        return torch.nn.functional.mse_loss(self.layer(x), x.sum(1, keepdim=True))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with (FOLDER / f"seen-{{os.getpid()}}").open("a") as file:
            file.write(json.dumps([self.current_epoch, batch[1].tolist()]) + "\\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.arange(SAMPLES))
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=int(sys.argv[1]), strategy=OmniStrategy(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
    said = [parameter.flatten().tolist() for parameter in model.parameters()]
    (FOLDER / f"ended-{{os.getpid()}}").write_text(json.dumps(said))
"""

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.network]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with Hosts(Network(sites=(3,))) as hosts:
            yield hosts
    except NoNamespacesError as error:
        pytest.skip(str(error))


def commands() -> list[str]:
    """Those of the page's first two blocks, without comments and empty lines."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def command(program: str) -> str:
    """The one of the page that starts with this."""
    [found] = [line for line in commands() if line.startswith(program)]
    return found


def start(hosts: Hosts, host: int, lines: list[str], folder: Path) -> subprocess.Popen[str]:
    """Runs lines of the page in a shell on a host, whose address the server's is in the place of the page's."""
    text = "\n".join(lines).replace("10.0.0.9", hosts.addresses[0])
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": search_path(),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }
    log = (folder / f"log-{host}-{shlex.split(lines[-1])[0]}").open("w")
    with log:
        return hosts.start(host, ["bash", "-ec", text], environment, cwd=folder, stdout=log, stderr=log, text=True)


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("log-*")))


def test_three_launchers_on_three_hosts_train_one_run_with_the_commands_of_the_page(
    hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(folder=str(tmp_path), ranks=4))
    server = start(hosts, 0, [command("lightning-omni serve")], tmp_path)
    key, deadline = tmp_path / ".config" / "lightning-omni" / "key", time.monotonic() + START
    while "parameter server on" not in logs(tmp_path):
        assert time.monotonic() < deadline, logs(tmp_path)
        time.sleep(0.05)
    (tmp_path / "key").write_bytes(key.read_bytes())  # as the page on machines says: over a channel that is trusted

    exports = [line for line in commands() if line.startswith("export")]
    assert len(exports) == 2
    plain, torchrun = command("python train.py"), command("torchrun --standalone --nproc-per-node 2")
    groups = [
        start(hosts, 0, [*exports, f"{torchrun} 2"], tmp_path),
        start(hosts, 1, [*exports, f"{plain} 1"], tmp_path),
        start(hosts, 2, [*exports, f"{plain} 1"], tmp_path),
    ]
    assert [group.wait(START) for group in groups] == [0, 0, 0], logs(tmp_path)
    assert server.wait(START) == 0, logs(tmp_path)

    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("ended-*"))]
    assert len(ends) == 4
    assert all(end == ends[0] for end in ends), "all ranks end with the weights of the server"
    seen: Counter[tuple[int, int]] = Counter()
    for path in tmp_path.glob("seen-*"):
        for epoch, samples in map(json.loads, path.read_text().splitlines()):
            seen.update((epoch, sample) for sample in samples)
    assert len(list(tmp_path.glob("seen-*"))) == 4
    assert set(seen) == {(epoch, sample) for epoch in range(2) for sample in range(192)}
    assert logs(tmp_path).count("takes part") >= 2
    for address in hosts.addresses:
        assert re.search(rf"joined from [^\n]*{re.escape(address)}\b", logs(tmp_path)), logs(tmp_path)


STARTS = """
from emulated_network import CONGESTION, Hosts, Network

with Hosts(Network(sites=(1,))) as hosts:
    hosts.start(0, ["sh", "-c", "echo $$; exec sleep 600"]).wait()  # says its number once it is there
"""


def test_processes_on_hosts_end_with_the_script_that_is_killed(hosts: Hosts) -> None:
    examples = str(Path(__file__).parents[1] / "examples" / "studies")
    script = subprocess.Popen(
        [sys.executable, "-c", STARTS], env={**os.environ, "PYTHONPATH": examples}, stdout=subprocess.PIPE, text=True
    )
    with script:
        assert script.stdout is not None
        pid = int(script.stdout.readline())
        descriptor = os.pidfd_open(pid)
        script.kill()
        ended, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended


def test_hosts_share_links_by_a_congestion_control_that_namespaces_may_use(hosts: Hosts) -> None:
    setting = hosts.inside(0, ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"])
    found = subprocess.run(setting, check=True, capture_output=True, text=True, timeout=START).stdout.strip()
    assert found in CONGESTION
