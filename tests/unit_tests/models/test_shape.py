"""The table of shapes against the parameter counts that the models' publishers give."""

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S
from torchtitan.errors import UserError
from torchtitan.models.shape.checkpoint_shape import FLAVORS, find_flavor
from torchtitan.models.shape.model_args import ModelArgs

# Elements in the published checkpoints (tied embeddings once).
PUBLISHED = {
    ("llama3", "3.2-1B"): 1_235_814_400,
    ("llama3", "3.2-3B"): 3_212_749_824,
    ("llama3", "3.1-8B"): 8_030_261_248,
    ("llama3", "3.1-70B"): 70_553_706_496,
    ("qwen2", "2.5-0.5B"): 494_032_768,
    ("qwen2", "2.5-1.5B"): 1_543_714_304,
    ("qwen2", "2.5-3B"): 3_085_938_688,
    ("qwen2", "2.5-7B"): 7_615_616_512,
    ("qwen2", "2.5-14B"): 14_770_033_664,
    ("qwen2", "2.5-32B"): 32_763_876_352,
    ("qwen2", "2.5-72B"): 72_706_203_648,
    ("qwen2", "2.5-Math-1.5B"): 1_543_714_304,
    ("qwen2", "2.5-Math-7B"): 7_615_616_512,
    ("qwen2", "2.5-Math-72B"): 72_706_203_648,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3_moe", "30B-A3B"): 30_532_122_624,
    ("qwen3_moe", "235B-A22B"): 235_093_634_560,
    ("gpt_oss", "20B"): 20_914_757_184,
    ("gpt_oss", "120B"): 116_829_156_672,
    ("qwen3_5_text", "9B"): 8_953_803_264,
}
ALL = [(family, flavor) for family, flavors in FLAVORS.items() for flavor in flavors]


@pytest.mark.parametrize(("family", "flavor"), ALL)
def test_parameter_counts(family: str, flavor: str) -> None:
    count = FLAVORS[family][flavor].num_parameters()
    if flavor == "debug":
        assert count < 2_000_000
    else:
        assert count == PUBLISHED[family, flavor]


@pytest.mark.parametrize(("family", "flavor"), ALL)
def test_config_round_trip(family: str, flavor: str) -> None:
    args = FLAVORS[family][flavor]
    assert ModelArgs.from_hf_config(args.to_hf_config()) == args


def test_find_flavor() -> None:
    assert find_flavor("qwen3", "0.6B") is find_flavor("auto", "0.6B") is FLAVORS["qwen3"]["0.6B"]
    with pytest.raises(UserError, match=r"'9B' is not known .*0\.6B"):
        find_flavor("qwen3", "9B")
    with pytest.raises(UserError, match="set model.name"):
        find_flavor("auto", "debug")
    with pytest.raises(UserError, match="allowed are auto, llama3"):
        find_flavor("gpt", "debug")


def test_shapes_need_no_torch() -> None:
    code = "import sys, torchtitan.models.shape.checkpoint_shape; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
