"""The decoder and its checkpoints against transformers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.roundings import forward_rounding
from torchtitan.config.job_config import Checkpoint as CheckpointConfig
from torchtitan.config.job_config import LRScheduler
from torchtitan.errors import UserError
from torchtitan.models.hf_checkpoint import export_policy, load_policy
from torchtitan.models.layers.elementwise import rms_norm, rotate
from torchtitan.models.shape.checkpoint_files import INDEX_FILE, fingerprint
from torchtitan.models.shape.model_args import read_model_args
from torchtitan.trainer.checkpoint import Checkpointer
from torchtitan.trainer.optimizer import BatchLRScheduler

Checkpoints = Callable[..., Path]
FIRST = "model.embed_tokens.weight"


def _transformers_logits(directory: Path, token_ids: torch.Tensor) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(token_ids).logits


@torch.no_grad()
def _logits(directory: Path, token_ids: torch.Tensor) -> torch.Tensor:
    return load_policy(directory).logits(token_ids)


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(5))


def test_norm_and_rotation_and_their_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    scale, by_head = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in ((8,), (3, 8))
    )
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-6), (x, scale))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-6), (x, by_head))
    angles = torch.randn(5, 1, 4, generator=generator, dtype=torch.float64)
    cosine = torch.cat((angles.cos(), angles.cos()), -1)
    sine = torch.cat((-angles.sin(), angles.sin()), -1)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cosine, sine), (x,))
    halves = torch.view_as_complex(torch.stack(x.detach().chunk(2, -1), -1)) * torch.exp(1j * angles)
    assert torch.allclose(rotate(x, cosine, sine), torch.cat((halves.real, halves.imag), -1))
    for dtype in (torch.float32, torch.bfloat16):
        values, weight = x.detach().to(dtype), scale.detach().to(dtype)
        expected = F.rms_norm(values, (8,), weight, 1e-6)
        assert torch.equal(rms_norm(values, weight, 1e-6), expected)
        with torch.no_grad():
            assert torch.equal(rms_norm(values, weight, 1e-6), expected)


def test_dtype_is_cast(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    policy = load_policy(tiny_checkpoint("qwen3", True), torch.bfloat16)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    export_policy(policy, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = load_policy(tmp_path / "half")
    for name, parameter in again.named_parameters():
        assert parameter.dtype is torch.float32 and torch.equal(parameter, policy.get_parameter(name).float())


@pytest.mark.parametrize(
    ("asked", "own", "written"),
    [("auto", "bfloat16", "bfloat16"), ("auto", None, "float32"), ("float16", "bfloat16", "float16")],
)
def test_exports_have_the_checkpoints_type_or_the_one_that_is_asked_for(
    asked: str, own: str | None, written: str, tiny_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_checkpoint("qwen3", False), tmp_path / "own")
    config = json.loads((directory / "config.json").read_text())
    config.pop("torch_dtype", None)
    (directory / "config.json").write_text(json.dumps(config | {"dtype": own}))
    policy = load_policy(directory)
    optimizer = torch.optim.SGD(policy.parameters())
    settings = CheckpointConfig(export_dtype=asked)  # type: ignore[arg-type]
    scheduler = BatchLRScheduler(optimizer, LRScheduler(), 1)
    exported = Checkpointer(settings, tmp_path / "run", policy, optimizer, scheduler).export_hf(3, directory)
    tensors = load_file(exported / "model.safetensors")
    assert json.loads((exported / "config.json").read_text())["dtype"] == written
    wanted = getattr(torch, written)
    assert all(torch.equal(tensors[name], parameter.to(wanted)) for name, parameter in policy.named_parameters())
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    assert model.dtype is wanted


def test_many_files_with_index(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama3", False)
    export_policy(load_policy(directory), tmp_path / "many", max_file_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    token_ids = _tokens(1, 20)
    expected = _logits(directory, token_ids)
    assert torch.equal(_logits(tmp_path / "many", token_ids), expected)
    rounding = forward_rounding(read_model_args(directory), expected.abs().max().item())
    assert (_transformers_logits(tmp_path / "many", token_ids) - expected).abs().max() <= rounding
    (tmp_path / "many" / files[1]).unlink()
    with pytest.raises(UserError, match=f"{files[1]}: file missing, though .*index.json names it"):
        load_policy(tmp_path / "many")


def _damaged(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_damaged_checkpoints_say_what_is_wrong(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen2", True)
    norm, bias = "model.norm.weight", "model.layers.1.self_attn.k_proj.bias"

    def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
        tensors[norm] = torch.ones(65)

    def missing(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[bias]

    def unknown(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(96, 64)

    def quantised(tensors: dict[str, torch.Tensor]) -> None:
        tensors[norm] = tensors[norm].mul(8).to(torch.int8)

    with pytest.raises(UserError, match=rf"{norm} is stored as I8. Quantised weights are not read: take the model's"):
        load_policy(_damaged(source, tmp_path / "quantised", quantised))
    with pytest.raises(UserError, match=rf"{norm} has shape \[65\], but config.json asks for \[64\]"):
        load_policy(_damaged(source, tmp_path / "shape", wrong_shape))
    with pytest.raises(UserError, match=f"lack {bias}, which config.json asks for"):
        load_policy(_damaged(source, tmp_path / "missing", missing))
    with pytest.raises(UserError, match=r"hold model\.layers\.2\.mlp\.up_proj\.weight, which the model"):
        load_policy(_damaged(source, tmp_path / "unknown", unknown))

    twice = tmp_path / "unknown"
    shutil.copyfile(source / "model.safetensors", twice / "model-1.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: has .*, as model-1\.safetensors has"):
        load_policy(twice)
    (twice / INDEX_FILE).write_text(json.dumps({"weight_map": {norm: "model-1.safetensors"}}))
    with pytest.raises(UserError, match=r"model\.safetensors: lies beside .*index\.json, which names others"):
        load_policy(twice)

    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_policy(cut)
    (cut / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*.safetensors files"):
        load_policy(cut)
    (cut / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is not readable JSON"):
        load_policy(cut)
    (cut / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 3}')
    with pytest.raises(UserError, match="config.json lacks hidden_size, intermediate_size"):
        load_policy(cut)
    with pytest.raises(UserError, match="nowhere/config.json: no such file"):
        load_policy(tmp_path / "nowhere")


def test_tensors_that_follow_from_others_are_ignored(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    source = tiny_checkpoint("llama3", True)
    token_ids = _tokens(1, 9)
    assert torch.equal(_logits(_damaged(source, tmp_path / "more", change), token_ids), _logits(source, token_ids))


def _changed(rows: slice | int = slice(0, 0), dtype: torch.dtype = torch.float32) -> Callable[..., None]:
    """Store a head beside the embedding that differs in these rows."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
        head = tensors["lm_head.weight"] = embedding.to(dtype).clone()
        head[rows] += 1

    return change


def _longer(tensors: dict[str, torch.Tensor]) -> None:
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = torch.cat([embedding, embedding[:1]])


@pytest.mark.parametrize("change", [_changed(slice(None)), _changed(0), _changed(8), _changed(-1), _longer])
def test_a_head_that_is_not_the_tied_embedding_is_refused(
    tiny_checkpoint: Checkpoints, tmp_path: Path, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan.models.shape.checkpoint_files.CHUNK", 1000)
    directory = _damaged(tiny_checkpoint("qwen2", True), tmp_path / "untied", change)
    with pytest.raises(UserError, match=r"ties lm_head\.weight and .*but here they are two: set tie_word_embeddings"):
        load_policy(directory)


def test_a_head_that_repeats_the_tied_embedding_is_the_same_model(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = _damaged(tiny_checkpoint("qwen2", True), tmp_path / "tied", _changed())
    assert load_policy(directory).args.tie_word_embeddings


def test_a_fingerprint_covers_every_value(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama3", False)
    (tmp_path / "nothing").mkdir()
    assert fingerprint(tmp_path / "nothing") == ""

    def in_bfloat16(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    same = _damaged(source, tmp_path / "half", in_bfloat16)
    expected = fingerprint(same)
    policy = load_policy(same)
    export_policy(policy, tmp_path / "many", max_file_bytes=40_000)  # in float32, over several files
    assert fingerprint(tmp_path / "many") == expected
    found = {expected}
    for number, (name, place) in enumerate([(FIRST, 0), (FIRST, -1), ("lm_head.weight", 9), ("model.norm.weight", -1)]):

        def change(tensors: dict[str, torch.Tensor], name: str = name, place: int = place) -> None:
            in_bfloat16(tensors)
            tensors[name].view(-1)[place] += 1

        found.add(fingerprint(_damaged(source, tmp_path / str(number), change)))
    assert len(found) == 5


def test_export_replaces_a_checkpoint_and_nothing_else(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    policy = load_policy(tiny_checkpoint("qwen3", True))
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "tokenizer.json").write_text('{"from": "assets"}')
    (assets / "secret.txt").write_text("not a tokenizer file")
    target = tmp_path / "deep" / "export"
    export_policy(policy, target, assets_from=assets)
    assert {path.name for path in target.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    with torch.no_grad():
        policy.model.norm.weight.add_(1)
    (target / "notes.txt").write_text("kept")
    export_policy(policy, target, max_file_bytes=30_000)
    export_policy(policy, target)
    names = {path.name for path in target.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "notes.txt"}
    assert torch.equal(load_policy(target).model.norm.weight, policy.model.norm.weight)
    assert [path.name for path in target.parent.iterdir()] == ["export"], "leftovers beside the export"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds files but no config.json"):
        export_policy(policy, other)
    assert (other / "thesis.tex").exists()
    with pytest.raises(UserError, match="no such directory to copy tokenizer files from"):
        export_policy(policy, tmp_path / "fresh", assets_from=tmp_path / "missing")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_an_export_can_be_read_by_whom_the_umask_says(mask: int, tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    policy = load_policy(tiny_checkpoint("qwen3", True))
    before = os.umask(mask)
    try:
        for _ in range(2):
            export_policy(policy, tmp_path / "export")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "export", *(tmp_path / "export").iterdir())}
    assert modes == {"export": 0o777 & ~mask, "config.json": 0o666 & ~mask, "model.safetensors": 0o666 & ~mask}


def test_failed_export_leaves_the_old_one(
    tiny_checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(tiny_checkpoint("qwen3", True))
    target = tmp_path / "export"
    export_policy(policy, target)
    before = (target / "model.safetensors").read_bytes()

    def no_space(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchtitan.models.hf_checkpoint.save_file", no_space)
    with pytest.raises(UserError, match="export failed: .*No space left"):
        export_policy(policy, target)
    assert (target / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_end_tokens_of_the_generation_config_count(tiny_checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint("qwen3", True) / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert read_model_args(tmp_path).eos_token_ids == (1, 7)
