"""What vLLM does on GPUs alone, and what we import of it, held against its sources: nothing of it is imported or run.

On a CPU vLLM runs its first model runner and cannot sleep; with Triton it runs Model Runner V2. What of both we rely on
is in files that every build has: in the one that is installed here, and in the wheel for GPUs, which is read where
VLLM_WHEEL is its path (pip download --no-deps "vllm==0.33.0").
"""

from __future__ import annotations

import ast
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.errors import UserError
from torchtitan.inference.engines.sidecar.sidecar_process import find_python

INFERENCE = Path(find_python.__code__.co_filename).parents[1]


@pytest.fixture(scope="module", params=["installed", "wheel for GPUs"])
def sources(request: pytest.FixtureRequest) -> Path | zipfile.Path:
    if request.param != "installed":
        wheel = os.environ.get("VLLM_WHEEL")
        return zipfile.Path(wheel) / "vllm" if wheel else pytest.skip("VLLM_WHEEL names no wheel")
    try:
        environment = Path(find_python("vllm", "")).absolute().parent.parent
    except UserError as error:
        pytest.skip(str(error))
    (package,) = environment.glob("lib/python3*/site-packages/vllm")
    return package


def imports_of_vllm() -> Iterator[tuple[str, str]]:
    """(module, name) of all that our code imports from vLLM."""
    for file in INFERENCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                yield from ((str(node.module), alias.name) for alias in node.names)


def test_every_name_imported_from_vllm_exists(sources: Path | zipfile.Path) -> None:
    wanted = sorted(set(imports_of_vllm()))
    assert ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload") in wanted
    names_of = {module: names_in(sources, module) for module, _ in wanted}
    missing = [f"{module}: {name}" for module, name in wanted if name not in names_of[module]]
    assert not missing


def names_in(sources: Path | zipfile.Path, module: str) -> set[str]:
    """What a module of vLLM has: what it defines, imports, or has lying in its folder."""
    place = sources
    for part in module.split(".")[1:]:
        place = place / part
    file = place.parent / f"{place.name}.py"
    file = file if file.is_file() else place / "__init__.py"
    if not file.is_file():
        return set()
    found = {entry.name.removesuffix(".py") for entry in place.iterdir()} if place.is_dir() else set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.ImportFrom(names=[ast.alias(name="*")], level=1):
                found |= names_in(sources, f"{module}.{node.module}")
            case ast.alias():
                found.add(node.asname or node.name)
            case ast.Constant(value=str()) if module == "vllm":
                found.add(node.value)  # the package's own names are imported when they are asked for
    return found


def functions(file: Path | zipfile.Path, name: str = "") -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module, or of one of its classes."""
    tree: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    if name:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    nodes = ast.iter_child_nodes(tree)
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def test_model_runner_v2_has_what_loading_and_log_probs_need(sources: Path | zipfile.Path) -> None:
    runner = functions(sources / "v1/worker/gpu/model_runner.py", "GPUModelRunner")
    assert "get_model" in runner and "weights_iterator" in arguments(runner["reload_weights"])
    # Log-probs of what was sampled are those behind temperature and truncation; a scored text has them, too.
    sampler = (sources / "v1/worker/gpu/sample/sampler.py").read_text(encoding="utf-8")
    assert "if self.logprobs_mode in PROCESSED_LOGPROBS_MODES:\n                logits = processed_logits" in sampler
    assert "PromptLogprobsWorker(" in (sources / "v1/worker/gpu/model_runner.py").read_text(encoding="utf-8")
    # Colocated engines are on an external launcher: only pipelines keep that from V2.
    unsupported = functions(sources / "config/vllm.py", "VllmConfig")["_get_v2_model_runner_unsupported_features"]
    code = ast.unparse(unsupported)
    assert (
        code.count("== 'external_launcher'")
        == code.count("== 'external_launcher' and self.parallel_config.pipeline")
        == 1
    )
    for option in ("prompt_logprobs", "logprobs_mode", "sleep", "weight_transfer", "tensor_parallel"):
        assert option not in code


def test_sleep_takes_our_levels_modes_and_tags(sources: Path | zipfile.Path) -> None:
    worker = functions(sources / "v1/worker/gpu_worker.py", "Worker")
    assert arguments(worker["sleep"]) == ["self", "level"] and arguments(worker["wake_up"]) == ["self", "tags"]
    routes = functions(sources / "entrypoints/serve/dev/sleep/api_router.py")
    asked = arguments(routes["sleep"])
    assert asked == ["raw_request", "level", "mode"] and "getlist('tags')" in ast.unparse(routes["wake_up"])
    engine = functions(sources / "v1/engine/llm_engine.py", "LLMEngine")
    assert arguments(engine["sleep"]) == ["self", "level", "mode"]
    # The second level keeps buffers, which no version of the weights brings.
    assert "named_buffers" in ast.unparse(worker["sleep"])


def test_the_head_sums_to_fp32_where_it_is_asked_to(sources: Path | zipfile.Path) -> None:
    text = (sources / "model_executor/layers/logits_processor.py").read_text(encoding="utf-8")
    assert "torch.mm(flat, lm_head.weight.t(), out_dtype=self.head_dtype)" in text
    assert 'getattr(config, "head_dtype", None)' in (sources / "config/model.py").read_text(encoding="utf-8")
