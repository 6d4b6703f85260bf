"""The image's and the manifest's commands, as far as they go without Docker and Kubernetes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from scripts.check_environment import read_requirements
from tests.patience import PATIENCE_S
from tests.unit_tests.conftest import write_stubs
from torchtitan.config.reading import read_command_line
from torchtitan.models.shape.checkpoint_shape import find_flavor
from torchtitan.preflight.validate import validated

ROOT = Path(__file__).resolve().parents[3]


def read_manifest() -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) → resource."""
    yaml = pytest.importorskip("yaml")
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    return {(document["kind"], document["metadata"]["name"]): document["spec"] for document in documents}


def test_pods_find_each_other_and_the_run_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    manifest = read_manifest()
    job, servers = manifest["Job", "grpo-train"], manifest["StatefulSet", "grpo-serve"]
    pod = job["template"]["spec"]
    (trainer,) = pod["containers"]
    arguments = trainer["args"]
    launch = parse_args(["--node-rank=0", *(word for word in arguments if "$(NODE_RANK)" not in word)])
    gpus = trainer["resources"]["limits"]["nvidia.com/gpu"]
    assert (launch.nnodes, int(launch.nproc_per_node)) == (str(job["completions"]), gpus)
    # A name that an indexed Job's pods have: job, index, and the headless service.
    assert launch.master_addr == f"grpo-train-0.{pod['subdomain']}" and ("Service", pod["subdomain"]) in manifest
    assert manifest["Service", "grpo-train"]["selector"] == job["template"]["metadata"]["labels"]
    assert manifest["Service", "grpo-serve"]["selector"] == servers["template"]["metadata"]["labels"]
    assert launch.training_script == "torchtitan.grpo_train"

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(find_flavor("llama3", "3.1-8B").to_hf_config()))
    write_stubs(model)
    words = [f"--model.hf_assets_path={model}" if "hf_assets_path" in word else word for word in arguments]
    monkeypatch.setenv("WORLD_SIZE", str(gpus * job["completions"]))
    monkeypatch.setenv("TORCHTITAN_ACTOR_TOKEN", "x")
    monkeypatch.chdir(ROOT)
    config = validated(read_command_line(words[words.index("torchtitan.grpo_train") + 1 :])[0], planning=True)
    assert config.inference.servers == [
        f"http://grpo-serve-{number}.{servers['serviceName']}:8000" for number in range(servers["replicas"])
    ]
    assert config.checkpoint.save_deadline_s < pod["terminationGracePeriodSeconds"]
    # One server for each pod, on all of its GPUs, with this run's settings.
    (server,) = servers["template"]["spec"]["containers"]
    shared = server["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--servers {shared} " in server["args"][0] and config.inference.engine.tensor_parallel_size == shared
    assert config.inference.backend in ("vllm", "sglang") and config.job.config_file in server["args"][0]


def test_pods_have_no_more_rights_than_they_need() -> None:
    manifest = read_manifest()
    for kind, name in (("Job", "grpo-train"), ("StatefulSet", "grpo-serve")):
        template = manifest[kind, name]["template"]
        pod, allowed = template["spec"], manifest["NetworkPolicy", name]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert allowed["podSelector"]["matchLabels"] == template["metadata"]["labels"]
        assert allowed["policyTypes"] == ["Ingress"] and all(rule["from"] for rule in allowed["ingress"])
        for container in pod["containers"]:
            # None could send the token of /health.
            assert all("httpGet" not in value for key, value in container.items() if key.endswith("Probe"))


def test_the_overlay_for_rdma_patches_what_is_there() -> None:
    yaml = pytest.importorskip("yaml")
    overlay = yaml.safe_load((ROOT / "deploy/kustomization.yaml").read_text())
    assert [(ROOT / "deploy" / name).is_file() for name in overlay["resources"]] == [True]
    for patch in overlay["patches"]:
        target = {"spec": read_manifest()[patch["target"]["kind"], patch["target"]["name"]]}
        for operation in yaml.safe_load(patch["patch"]):
            *folders, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
            place: Any = target
            for part in folders:
                place = place[int(part) if isinstance(place, list) else part]
            assert operation["op"] == "add" and last not in place


def test_the_image_can_compile_and_is_built_as_it_should_be() -> None:
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
    variables = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if re.match(r"ARG \w+=", line))
    # Wheels of torch since 2.12 are for CUDA 13 or for none that the engines know.
    assert variables["TORCH_BACKEND"] == "cu130" and all("cuda:13.0" in variables[name] for name in ("BASE", "DEVEL"))
    stages = dict(reversed(line.removeprefix("FROM ").split(" AS ")) for line in lines if " AS " in line)
    assert stages == {"vllm": "${BASE}", "none": "${BASE}", "sglang": "${DEVEL}"} and "-devel-" in variables["DEVEL"]
    (run,) = [line for line in lines if "apt-get install" in line]
    packages = re.search(r"apt-get install --yes --no-install-recommends ([^&]*)&&", run)
    assert packages and packages[1].split() == sorted(packages[1].split())
    # What its programs need, by what they would miss: kernels and launchers, versions from git, NUMA, a reaper.
    needed = {"g++", "gcc", "libc6-dev", "python3-dev", "git", "libnuma1", "python3-venv", "tini"}
    assert set(packages[1].split()) == needed
    # As hadolint has it.
    assert "apt-get update" in run and "rm -rf /var/lib/apt/lists/*" in run and "sudo" not in text
    assert not [line for line in lines if line.startswith(("ADD", "MAINTAINER")) or ":latest" in line]
    assert not [line for line in lines if line.startswith("FROM ") and "$" not in line]
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001"]
    assert lines[-1].startswith('ENTRYPOINT ["tini"') and any("pipefail" in line for line in lines)


def test_actions_are_named_by_commit() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"uses: (\S+)", text) == re.findall(r"uses: (\S+@[0-9a-f]{40}) # v", text)


def test_the_lock_has_every_requirement_with_hashes() -> None:
    from packaging.requirements import Requirement

    locked: dict[str, list[Requirement]] = {}
    for line in (ROOT / "scripts/requirements.lock").read_text().splitlines():
        text, *hashes = line.split(" --hash=")
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes), text
        requirement = Requirement(text)
        locked.setdefault(requirement.name, []).append(requirement)
    # Their build depends on the machine.
    assert not [name for name in locked if re.match("torch|triton|nvidia-|cuda-", name)]
    for wanted in map(Requirement, read_requirements(["data", "test"])):
        versions = [str(pin.specifier).removeprefix("==") for pin in locked.get(wanted.name, [])]
        assert wanted.name == "torch" or (versions and all(map(wanted.specifier.contains, versions))), wanted


@pytest.mark.parametrize("locked", [True, False])
def test_a_locked_set_up_has_pip_check_hashes_first(tmp_path: Path, locked: bool) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    python.chmod(0o755)
    command = f"source {ROOT}/scripts/setup_env.sh; setup_install {python} data"
    environment = {**os.environ, "LOCKED": "1" if locked else ""}
    subprocess.run(["bash", "-c", command], env=environment, timeout=PATIENCE_S, check=True)
    installed = [line for line in calls.read_text().splitlines() if "pip install" in line]
    assert installed[-1].endswith("--editable .[data]")
    checked = f"--no-deps --require-hashes -r {ROOT}/scripts/requirements.lock"
    assert [line.endswith(checked) for line in installed[:-1]] == [True] * locked


def test_the_image_gets_what_it_copies() -> None:
    lines = (ROOT / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*)$", lines, re.MULTILINE) for word in line.split()[:-1]]
    let_in = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
    for name in copied:
        assert (ROOT / name).exists() and any(fnmatch(name, pattern) for pattern in let_in), name
    assert sorted(copied) == sorted(let_in)
