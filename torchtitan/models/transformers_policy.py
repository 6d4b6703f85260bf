"""A policy whose layers are transformers' own, with our attention over packs inside and our head on top."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.distributed.device import device
from torchtitan.distributed.placement import Place
from torchtitan.errors import UserError
from torchtitan.models.decoder import Decoder
from torchtitan.models.head.logprob_head import LogProbHead, full_log_probs
from torchtitan.models.layers.attention import PackedLayout, packed_attention
from torchtitan.models.layers.batch_invariance import InvariantSizes
from torchtitan.models.lora import adapted_modules
from torchtitan.models.shape.checkpoint_shape import ForeignArgs, check_layers

# The name under which transformers knows our attention.
ATTENTION = "torchtitan"
# `check_packing` compares sequences of these lengths, with windows shortened to this size.
LENGTHS, WINDOW = [24, 17], 8


class TransformersPolicy(Decoder):
    """Has the modules, and so the parameter names, of the causal language model that transformers builds from
    config.json. Parameters are on the meta device until loaded.

    Raises UserError for a model that transformers lacks, or that cannot be trained on packs.
    """

    args: ForeignArgs
    hf: Any
    """transformers' model, which shares these modules and is not registered as a submodule"""

    def __init__(self, args: ForeignArgs):
        nn.Module.__init__(self)
        import transformers

        transformers.AttentionInterface.register(ATTENTION, _attend)
        transformers.AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
        self.args, self.context, self.lora, self.sequence_parts = args, None, None, 1
        self.alone = False
        """Compute each sequence separately, entirely with transformers' own code; for `check_packing`"""
        try:
            config = transformers.AutoConfig.for_model(**json.loads(args.source))
            with _parameters_on_meta():
                # In float32 whatever config.json says: factors in buffers would be rounded.
                hf = transformers.AutoModelForCausalLM.from_config(
                    config, attn_implementation=ATTENTION, dtype=torch.float32
                )
        except Exception as error:  # its checks of a config.json raise classes of their own
            problem = f"transformers {transformers.__version__} cannot make a model of its config.json: {error}"
            raise UserError(f"model_type {args.family!r}: {problem}") from error
        # Check again, now with the defaults that the file leaves out.
        check_layers(config.to_dict())
        if config.tie_word_embeddings != args.tie_word_embeddings:
            has = "no head" if args.tie_word_embeddings else "a head"
            problem = f"has {has} in its files, for which tie_word_embeddings in config.json must say what it is"
            raise UserError(f"model_type {args.family!r} {problem}: true or false")
        old = getattr(hf, "lm_head", None)
        if hf._is_stateful or not isinstance(old, nn.Linear):
            why = "has linear attention or another state" if hf._is_stateful else "has no head called lm_head"
            raise UserError(f"model_type {args.family!r} {why}: it is not trained here, whatever computes it")
        hf.lm_head = LogProbHead(old.in_features, old.out_features)
        hf.lm_head.to("meta")
        hf.lm_head.softcap = getattr(config, "final_logit_softcapping", None) or 0.0
        hf.lm_head.divisor = getattr(config, "logits_scaling", None) or 1 / (getattr(config, "logit_scale", None) or 1)
        for module in hf.modules():
            for name in module._non_persistent_buffers_set & module._buffers.keys():
                # Rotary frequencies and the like are computed, not loaded, so they must not be wiped or sent.
                setattr(module, name, module._buffers.pop(name).to(device()).clone())
        self._modules = hf._modules
        object.__setattr__(self, "hf", hf)
        self.tie_weights()
        self._files = {name: _names_in_files(hf, name, tensor) for name, tensor in self.state_dict().items()}

    def train(self, mode: bool = True) -> TransformersPolicy:
        """Turn the adapters' dropout on or off. transformers' own modules never drop anything, as in engines."""
        super().train(False)
        for _, module, _ in adapted_modules(self):
            module.training = mode
        return self

    @property
    def layers(self) -> nn.ModuleList:
        stacks = [module for module in self.hf.base_model.modules() if isinstance(module, nn.ModuleList)]
        return next(stack for stack in stacks if len(stack) == self.args.num_hidden_layers)

    def names_in_files(self, name: str) -> list[tuple[str, Place]]:
        module, adapter, factor = name.partition(".lora_")
        if adapter:
            parts = [
                (part.removesuffix(".weight") + adapter + factor, place)
                for part, place in self._files[f"{module}.weight"]
            ]
        else:
            parts = self._files.get(name, [(name, None)])
        composite = self.args.composite
        return parts if composite is None else [(composite.name_in_files(part), place) for part, place in parts]

    def tie_weights(self) -> None:
        if self.args.tie_word_embeddings:
            self.lm_head.weight = self.hf.get_input_embeddings().get_parameter("weight")

    def invariant_sizes(self) -> InvariantSizes:
        return InvariantSizes()

    def computes_apart(self) -> str | None:
        return "the layers are those of transformers, which may look back by other means than attention"

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """See Decoder.forward. Routing replay is not supported."""
        if not self.alone:
            return super().forward(*inputs, **named)
        token_ids, layout, targets = inputs
        parts = token_ids.split(layout.lengths)
        return full_log_probs(
            torch.cat([self.hf(input_ids=part[None], use_cache=False).logits[0] for part in parts]), targets
        )

    def hidden_states(
        self, token_ids: torch.Tensor, positions: torch.Tensor, layout: PackedLayout, routes: torch.Tensor | None
    ) -> torch.Tensor:
        inputs = {"input_ids": token_ids[None], "position_ids": positions[None]}
        hidden: torch.Tensor = self.hf.base_model(**inputs, use_cache=False, packed=layout).last_hidden_state[0]
        return hidden


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed: PackedLayout | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] each -> [1, T, heads, D of value], the interface of transformers' attention functions."""
    if packed is None or not getattr(module, "is_causal", True):
        raise UserError(f"{type(module).__name__} of transformers: its attention is not that of packed sequences")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    missing = q.shape[-1] - v.shape[-1]
    if scaling is None:
        scaling = q.shape[-1] ** -0.5
    out = packed_attention(
        q,
        k,
        F.pad(v, (0, missing)),
        packed.cumulative,
        packed.bounds,
        window=sliding_window or 0,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None, ..., : v.shape[-1]], None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules made inside on the meta device; their buffers are computed."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.detach().to("meta")))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _names_in_files(hf: Any, name: str, tensor: torch.Tensor) -> list[tuple[str, Place]]:
    """Return a parameter's names in transformers' files, with the part that each holds. transformers' own conversion is
    applied to numbered rows to find out."""
    from transformers.core_model_loading import revert_weight_conversion

    leading = tensor.shape[: max(1, tensor.dim() - 1)]
    numbers = torch.arange(leading.numel()).view([*leading, *[1] * (tensor.dim() - len(leading))])
    found: list[tuple[str, Place]] = []
    for part, taken in revert_weight_conversion(hf, {name: numbers}).items():
        first, rows = int(taken.flatten()[0]), numbers.shape[-2] if tensor.dim() > 2 else 0
        place: Place = None
        if rows and taken.dim() < numbers.dim():
            entry, row = divmod(first, rows)
            place = entry if len(taken) == rows else (entry, (row, row + len(taken)))
        expected = torch.arange(first, first + taken.numel()).view(taken.shape)
        if not torch.equal(taken, expected) or (place is None and taken.shape != numbers.shape):
            raise UserError(
                f"{name}: {part} in files is neither this parameter nor rows of it; weights could not be sent"
            )
        found.append((part, place))
    return found


@torch.no_grad()
def check_packing(policy: TransformersPolicy, tolerance: float) -> None:
    """Compare a pack of two sequences with transformers' own result for each of them alone (collective).

    Raises UserError if log-probs differ by more than `tolerance` on average: then layers mix the sequences of a pack,
    or do something that our packing, windows or head do not support.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(policy.args.vocab_size, (sum(LENGTHS),), generator=generator).to(device())
    config, head, layout = policy.hf.config, policy.lm_head, PackedLayout(LENGTHS, device())
    windowed = [m for m in (config, *policy.modules()) if isinstance(getattr(m, "sliding_window", None), int)]
    before = [module.sliding_window for module in windowed], head.softcap, head.divisor
    for module in windowed:
        module.sliding_window = WINDOW
    try:
        found, _ = policy(tokens, layout, tokens.roll(-1))
        # transformers applies its softcap and divisor to logits itself.
        policy.alone, config._attn_implementation, head.softcap, head.divisor = True, "eager", 0.0, 1.0
        expected, _ = policy(tokens, layout, tokens.roll(-1))
    finally:
        policy.alone, config._attn_implementation = False, ATTENTION
        windows, head.softcap, head.divisor = before
        for module, window in zip(windowed, windows, strict=True):
            module.sliding_window = window
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # No backward follows that would do so.
                module.reshard()
    apart = (found - expected).abs()
    # A convolution may mix only the first tokens of the second sequence.
    difference = max(apart.mean().item(), apart[LENGTHS[0] :][:3].mean().item())
    if not difference <= tolerance:
        raise UserError(
            f"model_type {policy.args.family!r} cannot be trained here: two sequences in one pack have log-probs that "
            f"differ from those of each alone by {difference:.3g} nats on average (at most {tolerance:g}: rounding)"
        )
