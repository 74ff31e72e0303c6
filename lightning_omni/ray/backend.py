"""Workers of Ray Train that are each a compute group of a run, with a parameter server beside Ray's controller.

Ray calls them replica groups: each has a process group of its own, and Ray replaces one that fails.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.train.torch import TorchConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightning_omni.strategy.arguments import SERVER
from lightning_omni.transport.zeromq.keys import ENVIRONMENT, KEY_BYTES


class ElasticTorchConfig(TorchConfig):  # type: ignore[misc, unused-ignore]
    """The torch_config that `lightning_omni.ray.elastic_torch_config` makes."""

    serve_options = ""

    @property
    def backend_cls(self) -> type:
        return ElasticBackend


class ElasticBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """The setup of workers that are each a compute group, in Ray's controller."""

    has_replica_groups = True

    def __init__(self) -> None:
        super().__init__()
        self._server: Any = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Start the server at the first call; set its address, and make a process group, in each of these workers."""
        if self._server is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actor = ray.remote(num_cpus=0)(ServerActor).options(scheduling_strategy=here)
            self._server = actor.remote(backend_config.serve_options)
        worker_group.execute(_set_variables, ray.get(self._server.variables.remote()))
        start = super().on_start
        all_of_them = getattr(worker_group, "get_replica_groups", lambda: [worker_group])()
        with ThreadPoolExecutor() as executor:
            for started in [executor.submit(start, each, backend_config) for each in all_of_them]:
                started.result()


class ServerActor:
    """The process of ``lightning-omni serve`` for one run, which ends with this actor and writes to its log."""

    def __init__(self, options: str) -> None:
        key = secrets.token_hex(KEY_BYTES)
        command = [sys.executable, "-m", "lightning_omni", "serve", "--once", "--port", "0", *shlex.split(options)]
        self._process = subprocess.Popen(
            [*command, "--host", ray.util.get_node_ip_address()],
            env={**os.environ, ENVIRONMENT: key},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        found, printed = None, ""
        while found is None and (line := self._process.stderr.readline()):  # warnings may precede it
            found, printed = re.search(r"tcp://\S+:\d+", line), printed + line
        if found is None:
            raise RuntimeError(f"the parameter server did not start: {printed}")
        self._variables = {SERVER: found[0], ENVIRONMENT: key}
        threading.Thread(target=self._log, daemon=True).start()

    def variables(self) -> dict[str, str]:
        return self._variables

    def _log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            sys.stderr.write(line)


def _set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)
