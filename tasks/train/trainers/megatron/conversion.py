"""Megatron's parameters and Hugging Face's tensors: which is which, and how one is cut out of the other.

Nothing here is arithmetic: every element is copied, so a conversion there and back is exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from transformers import PretrainedConfig

from tasks.train.trainers.megatron.model import has_qk_norm, has_qkv_bias, head_size, padded_vocabulary

Reader = Callable[[str, slice, slice], Tensor]
"""Rows and columns of the Hugging Face tensor of a name; a vector's columns are `slice(None)`."""

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the whole model, under Megatron's name with global layer and expert numbers.

    | layout | this rank's shard |
    |---|---|
    | whole | everything |
    | columns | an equal part of them |
    | vocabulary | an equal part of the rows, padded with zeros to a multiple of the ranks |
    | gated | of gate and up an equal part of the rows each, one above the other |
    | grouped | query, key and value rows of an equal part of the key-value groups, group after group |
    """

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Literal["whole", "columns", "vocabulary", "gated", "grouped"]
    expert: int | None = None
    copy: bool = False  # of another parameter that is tied to it: filled, never exported


class Conversion:
    """The parameters of a model of a family, in Hugging Face's order, for one tensor-parallel size."""

    def __init__(self, model: PretrainedConfig, tensor_parallel: int):
        self._model = model
        self._parts = tensor_parallel
        self.parameters = {parameter.megatron: parameter for parameter in _parameters(model)}

    def mark_sharded(self, local: dict[str, nn.Parameter]) -> None:
        """Tell Megatron which parameters differ between tensor-parallel ranks.

        It marks them where it initialises them, which it is not asked to; the gradient's norm counts a
        parameter without the mark on the first rank only.
        """
        for name, parameter in local.items():
            layout = self.parameters[name].layout
            if layout != "whole" and not getattr(parameter, "tensor_model_parallel", False):
                dimension = 1 if layout == "columns" else 0
                set_tensor_model_parallel_attributes(parameter, True, dimension, 1)

    def shard(self, parameter: Parameter, read: Reader, part: int) -> Tensor:
        """The shard of tensor-parallel rank `part`, from slices of the Hugging Face tensors only."""
        names, parts, model = parameter.hugging_face, self._parts, self._model
        match parameter.layout:
            case "whole":
                return read(names[0], ALL, ALL)
            case "columns":
                columns = self._columns(parameter) // parts
                return read(names[0], ALL, slice(part * columns, (part + 1) * columns))
            case "vocabulary":
                rows = padded_vocabulary(model.vocab_size, parts) // parts
                first, end = part * rows, min((part + 1) * rows, model.vocab_size)
                tensor = read(names[0], slice(min(first, end), end), ALL)
                missing = rows - tensor.shape[0]
                return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor
            case "gated":
                rows = self._gated_rows(parameter) // parts
                chosen = slice(part * rows, (part + 1) * rows)
                return torch.cat([read(name, chosen, ALL) for name in names])
            case "grouped":
                groups = model.num_key_value_heads // parts
                pieces = []
                for name, rows in zip(names, self._group_rows(), strict=True):
                    tensor = read(name, slice(part * groups * rows, (part + 1) * groups * rows), ALL)
                    pieces.append(tensor.reshape(groups, rows, *tensor.shape[1:]))
                return torch.cat(pieces, 1).flatten(0, 1)

    def whole(self, parameter: Parameter, shards: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors of the shards of all tensor-parallel ranks."""
        names = parameter.hugging_face
        match parameter.layout:
            case "whole":
                yield names[0], shards[0]
            case "columns":
                yield names[0], torch.cat(shards, 1)
            case "vocabulary":
                yield names[0], torch.cat(shards)[: self._model.vocab_size]
            case "gated":
                for index, name in enumerate(names):
                    yield name, torch.cat([shard.chunk(2)[index] for shard in shards])
            case "grouped":
                rows = self._group_rows()
                groups = [shard.unflatten(0, (-1, sum(rows))).split(rows, 1) for shard in shards]
                for index, name in enumerate(names):
                    yield name, torch.cat([pieces[index].flatten(0, 1) for pieces in groups])

    def _columns(self, parameter: Parameter) -> int:
        model = self._model
        if parameter.hugging_face[0].endswith("o_proj.weight"):
            return int(model.num_attention_heads * head_size(model))
        return self._gated_rows(parameter)

    def _gated_rows(self, parameter: Parameter) -> int:
        model = self._model
        return int(model.intermediate_size if parameter.expert is None else model.moe_intermediate_size)

    def _group_rows(self) -> tuple[int, int, int]:
        """Query, key and value rows of one key-value group."""
        size = head_size(self._model)
        return size * (self._model.num_attention_heads // self._model.num_key_value_heads), size, size


def local_parameters(stage: GPTModel) -> dict[str, nn.Parameter]:
    """This rank's parameters by Megatron's global name, in a fixed order."""
    named: dict[str, nn.Parameter] = {}
    for name, parameter in stage.named_parameters():
        path = name.split(".")
        for index, part in enumerate(path):
            if part == "layers":
                path[index + 1] = str(stage.decoder.layers[int(path[index + 1])].layer_number - 1)
            elif part == "local_experts":
                experts = stage.config.num_moe_experts // stage.config.expert_model_parallel_size
                first = parallel_state.get_expert_model_parallel_rank() * experts
                path[index + 1] = str(int(path[index + 1]) + first)
        named[".".join(path)] = parameter
    return named


def _parameters(model: PretrainedConfig) -> Iterator[Parameter]:
    yield Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocabulary")
    for layer in range(model.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention, theirs_attention = f"{ours}self_attention.", f"{theirs}self_attn."
        yield Parameter(f"{ours}input_layernorm.weight", (f"{theirs}input_layernorm.weight",), "whole")
        kinds = ("weight", "bias") if has_qkv_bias(model) else ("weight",)
        for kind in kinds:
            projections = tuple(f"{theirs_attention}{name}_proj.{kind}" for name in "qkv")
            yield Parameter(f"{attention}linear_qkv.{kind}", projections, "grouped")
        if has_qk_norm(model):
            for name in "qk":
                norm = f"{theirs_attention}{name}_norm.weight"
                yield Parameter(f"{attention}{name}_layernorm.weight", (norm,), "whole")
        yield Parameter(f"{attention}linear_proj.weight", (f"{theirs_attention}o_proj.weight",), "columns")
        norm = f"{theirs}post_attention_layernorm.weight"
        yield Parameter(f"{ours}pre_mlp_layernorm.weight", (norm,), "whole")
        if model.model_type == "qwen3_moe":
            yield Parameter(f"{ours}mlp.router.weight", (f"{theirs}mlp.gate.weight",), "whole")
            for expert in range(model.num_experts):
                ours_expert = f"{ours}mlp.experts.local_experts.{expert}."
                yield from _mlp(ours_expert, f"{theirs}mlp.experts.{expert}.", expert)
        else:
            yield from _mlp(f"{ours}mlp.", f"{theirs}mlp.", None)
    yield Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), "whole")
    head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    # With tied embeddings only a last stage that is not the first has this: its own copy.
    yield Parameter("output_layer.weight", (head,), "vocabulary", copy=model.tie_word_embeddings)


def _mlp(ours: str, theirs: str, expert: int | None) -> Iterator[Parameter]:
    gated = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    yield Parameter(f"{ours}linear_fc1.weight", gated, "gated", expert)
    yield Parameter(f"{ours}linear_fc2.weight", (f"{theirs}down_proj.weight",), "columns", expert)
