"""The recipes of the docs: manifests and job scripts, as far as they can be tried without a cluster."""

from __future__ import annotations

import inspect
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from core import ENVIRONMENT, SERVER, serve

yaml = pytest.importorskip("yaml")
kubernetes = pytest.importorskip("kubernetes_validate")
DOCS = Path(__file__).parents[1] / "docs"
RECIPES = DOCS / "recipes"
SCRIPTS = sorted(RECIPES.glob("*.sh"))


def serve_options(words: Sequence[str]) -> set[str]:
    """Options of a command line of lightning-omni serve, as its function has them."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], Any]:
    every = list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))
    named = {(each["kind"], each["metadata"]["name"]): each for each in every}
    assert len(named) == len(every)
    return named


def pod_of(job: Any) -> Any:
    return job["spec"]["template"]["spec"]


def pods(manifests: dict[tuple[str, str], Any]) -> Iterator[Any]:
    for (kind, _), each in manifests.items():
        if kind == "Job":
            assert each["apiVersion"] == "batch/v1"
            yield pod_of(each)


def test_every_volume_port_and_secret_of_the_manifests_is_there(manifests: dict[tuple[str, str], Any]) -> None:
    claims = {name for kind, name in manifests if kind == "PersistentVolumeClaim"}
    for pod in pods(manifests):
        volumes = {each["name"]: each for each in pod["volumes"]}
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
        (container,) = pod["containers"]
        assert {each["name"] for each in container.get("volumeMounts", ())} == set(volumes)
        ports = {each["name"] for each in container.get("ports", ())}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in ports
        secret = next(each for each in container["env"] if each["name"] == ENVIRONMENT)
        assert secret["valueFrom"]["secretKeyRef"] == {"name": "lightning-omni", "key": "key"}


def test_the_server_of_the_manifests_is_found_probed_and_goes_on(manifests: dict[tuple[str, str], Any]) -> None:
    job, service = manifests["Job", "lightning-omni-server"], manifests["Service", "lightning-omni"]
    (container,) = pod_of(job)["containers"]
    program, command, *words = container["command"]
    assert (program, command) == ("lightning-omni", "serve")
    assert serve_options(words) <= set(inspect.signature(serve).parameters)
    given = dict(word[2:].split("=") for word in words if "=" in word)
    assert "--once" in words
    assert pod_of(job)["restartPolicy"] == "OnFailure"
    assert given["state"] in {each["mountPath"] for each in container["volumeMounts"]}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"control": int(given["port"]), "data": int(given["data-port"]), "http": int(given["http"])}
    assert given["host"] == given["http-host"] == "0.0.0.0"
    probed = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert probed == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    # Ranks are told the data port by number: the Service must have the same.
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == {
        name: ports[name] for name in ("control", "data")
    }


def test_the_groups_of_the_manifests_join_it_and_may_be_disrupted(manifests: dict[tuple[str, str], Any]) -> None:
    job, policy = manifests["Job", "lightning-omni-groups"], manifests["NetworkPolicy", "lightning-omni-server"]
    (container,) = pod_of(job)["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment[SERVER] == "tcp://lightning-omni:5555"
    assert pod_of(job)["restartPolicy"] == "Never"  # or there can be no podFailurePolicy
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onPodConditions"] == [
        {"type": "DisruptionTarget", "status": "True"}
    ]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert pod_of(job)["terminationGracePeriodSeconds"] >= 60
    (groups, _) = policy["spec"]["ingress"]
    assert groups["from"][0]["podSelector"]["matchLabels"] == job["spec"]["template"]["metadata"]["labels"]


VERSIONS = ("1.26", "1.32", "1.37")
"""Of Kubernetes: the oldest whose Jobs have a podFailurePolicy by default, one between, and the latest."""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_are_what_kubernetes_accepts(version: str, manifests: dict[tuple[str, str], Any]) -> None:
    for each in manifests.values():
        assert kubernetes.validate(each, version, strict=True) == version


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        (("spec", "template", "spec", "containers", 0), "volumeMount", []),
        (("spec", "template", "spec", "containers", 0, "livenessProbe"), "periodSecond", 10),
        (("spec", "template", "spec"), "restartPolicy", 1),
        (("spec",), "backoffLimit", "many"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_misspelt_field_or_a_value_of_another_type_is_none(
    version: str, path: Sequence[Any], name: str, value: Any, manifests: dict[tuple[str, str], Any]
) -> None:
    job = deepcopy(manifests["Job", "lightning-omni-server"])
    reduce(getitem, path, job)[name] = value
    with pytest.raises(
        kubernetes.ValidationError, match=name if isinstance(value, list) or value == 10 else str(value)
    ):
        kubernetes.validate(job, version, strict=True)


# --- SkyPilot --------------------------------------------------------------------------------------------------------


def test_a_group_of_skypilot_joins_the_server_with_what_the_shell_has(commands: Path) -> None:
    server, group = (yaml.safe_load((RECIPES / f"skypilot-{name}.yaml").read_text()) for name in ("server", "group"))
    assert server["secrets"] == group["secrets"] == {ENVIRONMENT: None}
    assert group["envs"] == {SERVER: None}
    assert group["resources"]["use_spot"]
    code, (served,) = run_text(server["run"], commands)
    given = dict(pairwise(served.split()))
    assert code == 0
    assert serve_options(served.split()) <= set(inspect.signature(serve).parameters)
    assert server["resources"]["ports"] == [int(given["--port"]), int(given["--data-port"])]
    assert (given["--host"], "--once" in served) == ("0.0.0.0", True)
    assert f":{given['--port']}" in (RECIPES / "skypilot-server.yaml").read_text().partition("resources:")[0]
    code, calls = run_text(group["run"], commands, SKYPILOT_NUM_GPUS_PER_NODE="4")
    assert (code, calls[-1]) == (0, "torchrun --standalone --nproc-per-node 4 train.py")


# --- Scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_scripts_are_ones_that_bash_reads(script: Path) -> None:
    assert script.read_text().startswith("#!/bin/bash\n")
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=30)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Commands of a cluster, in a folder of their own: each writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    bodies = {
        "srun": 'echo "srun $LIGHTNING_OMNI_SERVER $LIGHTNING_OMNI_KEY $*" >> "$LOG"; read -r code < "$LOG.codes";'
        ' sed -i 1d "$LOG.codes"; exit "$code"',
        "scontrol": 'echo "scontrol $*" >> "$LOG"',
        "lightning-omni": 'echo "lightning-omni $*" >> "$LOG"',
        "torchrun": 'echo "torchrun $*" >> "$LOG"',
        "hostname": 'echo "10.0.0.9 10.1.0.9"',
        "curl": 'echo "curl ${*: -1}" >> "$LOG"; [[ "$*" == *api/token* ]] && echo token || [ -e "$LOG.notice" ]',
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def run_script(name: str, commands: Path, *words: str, **env: str) -> tuple[int, list[str]]:
    """Exit status of a recipe, and what it has called."""
    return run_bash([str(RECIPES / name), *words], commands, **env)


def run_text(text: str, commands: Path, **env: str) -> tuple[int, list[str]]:
    """Exit status of a part of a recipe, and what it has called."""
    return run_bash(["-c", text], commands, **env)


def run_bash(words: Sequence[str], commands: Path, **env: str) -> tuple[int, list[str]]:
    log = commands / "log"
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "LOG": str(log), **env}
    ended = subprocess.run(["bash", *words], env=environment, timeout=30, stdin=subprocess.DEVNULL, check=False)
    return ended.returncode, log.read_text().splitlines()


def test_the_slurm_server_says_where_it_is_and_keeps_its_key(commands: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for _ in range(2):  # put into the queue again
        code, called = run_script("slurm-server.sh", commands, OMNI_SHARED=str(shared))
        assert code == 0
    assert (shared / "server").read_text() == "tcp://10.0.0.9:5555\n"
    assert len(bytes.fromhex((shared / "key").read_text())) == 32
    assert stat.S_IMODE((shared / "key").stat().st_mode) == 0o600
    first, second = (line.split() for line in called)
    assert first == second
    assert serve_options(first[2:]) <= set(inspect.signature(serve).parameters)
    assert run_script("slurm-server.sh", commands)[0] != 0  # no directory was named


@pytest.mark.parametrize(
    ("codes", "ends", "calls"),
    [
        ((0,), 0, ["srun"]),
        ((1, 1, 0), 0, ["srun", "srun", "srun"]),
        ((1, 143), 0, ["srun", "srun", "scontrol requeue 7_3"]),
    ],
)
def test_a_slurm_group_joins_again_after_a_failure_and_is_put_into_the_queue_after_a_signal(
    codes: Sequence[int], ends: int, calls: Sequence[str], commands: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "server").write_text("tcp://10.0.0.9:5555\n")
    (shared / "key").write_text("5a5a\n")
    (commands / "log.codes").write_text("".join(f"{code}\n" for code in codes))
    code, called = run_script(
        "slurm-groups.sh", commands,
        OMNI_SHARED=str(shared), OMNI_PAUSE="0", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3",
    )  # fmt: skip
    assert code == ends
    assert [line if line.startswith("scontrol") else line.split()[0] for line in called] == calls
    assert called[0].startswith("srun tcp://10.0.0.9:5555 5a5a torchrun --standalone --nproc-per-node 4 train.py")


def test_a_slurm_group_that_is_told_of_its_time_limit_is_put_into_the_queue(commands: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "server").write_text("tcp://10.0.0.9:5555\n")
    (shared / "key").write_text("5a5a\n")
    srun = commands / "srun"
    torchrun = 'trap "kill $!; exit 1" TERM; sleep 60 & kill -TERM $PPID; wait'  # the agent ends with 1
    srun.write_text(f"#!/bin/bash\necho srun >> {commands}/log\n{torchrun}\n")
    code, called = run_script(
        "slurm-groups.sh", commands,
        OMNI_SHARED=str(shared), OMNI_PAUSE="0", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3",
    )  # fmt: skip
    assert (code, called) == (0, ["srun", "scontrol requeue 7_3"])


def test_a_group_on_a_spot_instance_is_told_before_the_instance_is_taken(commands: Path) -> None:
    (commands / "log.notice").touch()
    code, called = run_script(
        "spot.sh", commands, "bash", "-c", "trap 'exit 143' TERM; while :; do sleep 0.02; done", OMNI_EVERY="0.05"
    )
    assert code == 143
    assert called[-1].endswith("/meta-data/spot/instance-action")
    (commands / "log.notice").unlink()
    assert run_script("spot.sh", commands, "bash", "-c", "sleep 0.1; exit 3", OMNI_EVERY="0.05")[0] == 3


def test_every_recipe_stands_in_the_docs() -> None:
    page = (DOCS / "how-to" / "joining.md").read_text()
    for recipe in RECIPES.iterdir():
        assert f"(../recipes/{recipe.name})" in page
