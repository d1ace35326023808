"""A Hugging Face configuration as a Megatron model: this rank's stage and shard of it, weights not set."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import moe
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig, PretrainedConfig

from tasks.train.config import MegatronTrainerConfig
from tasks.train.trainers.megatron.attention import CausalAttention, RmsNorm

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` in config.json."""

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's rope scaling has built in; its factor is free."""


class UnsupportedModel(ValueError):
    """A model, or a way to split it, that the Megatron trainer cannot train. The message names the option."""


def read_model_config(directory: str | Path) -> PretrainedConfig:
    """config.json of a directory. Raises `UnsupportedModel`."""
    model: PretrainedConfig = AutoConfig.from_pretrained(directory)
    _refuse_unsupported(model)
    return model


def check_parallelism(model: PretrainedConfig, config: MegatronTrainerConfig) -> None:
    """Raises `UnsupportedModel` unless the model divides evenly."""
    experts = getattr(model, "num_experts", None) or 0
    for option, parts, what, number in (
        ("tensor_parallel", config.tensor_parallel, "attention heads", model.num_attention_heads),
        ("tensor_parallel", config.tensor_parallel, "key-value heads", model.num_key_value_heads),
        ("tensor_parallel", config.tensor_parallel, "MLP columns", model.intermediate_size),
        ("pipeline_parallel", config.pipeline_parallel, "layers", model.num_hidden_layers),
        ("expert_parallel", config.expert_parallel, "experts", experts),
    ):
        if number % parts or (parts > 1 and not number):
            raise UnsupportedModel(
                f"train.trainer.{option} ({parts}) does not divide the model's {number} {what}: change it"
            )
    if experts and config.tensor_parallel > 1 and not config.sequence_parallel:
        raise UnsupportedModel(
            "a mixture of experts with train.trainer.tensor_parallel above 1 needs "
            "train.trainer.sequence_parallel: true"
        )


def initialize_parallelism(config: MegatronTrainerConfig, seed: int) -> None:
    """Megatron's process groups, out of the initialised torch.distributed.

    Megatron keeps them for the process: trainers of one process that live together split the model alike.
    """
    sizes = (config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)
    if parallel_state.is_initialized():
        if sizes == (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        ):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.tensor_parallel,
        create_gloo_process_groups=False,
    )
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(seed)


def padded_vocabulary(vocabulary: int, tensor_parallel: int) -> int:
    """The vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-vocabulary // tensor_parallel) * tensor_parallel


def transformer_config(model: PretrainedConfig, config: MegatronTrainerConfig) -> TransformerConfig:
    """Megatron's description of the model and of how it is split. Gradients are summed, never averaged."""
    bf16 = config.compute_dtype == "bfloat16"
    options: dict[str, Any] = {}
    if model.model_type == "qwen3_moe":
        options |= {
            "num_moe_experts": model.num_experts,
            "moe_router_topk": model.num_experts_per_tok,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            # Renormalising what softmax gives the chosen is a softmax over the chosen only.
            "moe_router_pre_softmax": not model.norm_topk_prob,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    if config.activation_checkpointing:
        options |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=head_size(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=has_qkv_bias(model),
        qk_layernorm=has_qk_norm(model),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=config.tensor_parallel,
        sequence_parallel=config.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the one that allows varying lengths
        calculate_per_token_loss=True,
        **options,
    )


def build_stage(model: PretrainedConfig, config: TransformerConfig) -> GPTModel:
    """This rank's pipeline stage, its weights not set. Its last stage returns vocabulary-parallel logits."""
    rope: dict[str, Any] = model.rope_parameters
    if not hasattr(moe.moe_utils, "te_general_gemm"):
        # megatron-core 0.16.1 reads the name without Transformer Engine too.
        setattr(moe.moe_utils, "te_general_gemm", None)  # noqa: B010
    stage = GPTModel(
        config=config,
        transformer_layer_spec=_layers(config),
        vocab_size=padded_vocabulary(model.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 1.0),
    )
    return stage.cuda() if torch.cuda.is_available() else stage


def head_size(model: PretrainedConfig) -> int:
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def has_qkv_bias(model: PretrainedConfig) -> bool:
    return bool(model.model_type == "qwen2")


def has_qk_norm(model: PretrainedConfig) -> bool:
    return model.model_type in ("qwen3", "qwen3_moe")


def _layers(config: TransformerConfig) -> TransformerBlockSubmodules | ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RmsNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RmsNorm)


def _refuse_unsupported(model: PretrainedConfig) -> None:
    def refuse(what: str) -> None:
        raise UnsupportedModel(
            f"the Megatron trainer does not train models with {what}: change model.path, or take "
            "train.trainer.kind: torch"
        )

    if model.model_type not in FAMILIES:
        refuse(f"model_type {model.model_type} (it knows {', '.join(FAMILIES)})")
    if getattr(model, "attention_bias", False) or getattr(model, "mlp_bias", False):
        refuse("attention_bias or mlp_bias")
    if getattr(model, "use_sliding_window", False):
        refuse("use_sliding_window")
    if model.hidden_act != "silu":
        refuse(f"hidden_act {model.hidden_act}")
    if getattr(model, "mlp_only_layers", None) or getattr(model, "decoder_sparse_step", 1) != 1:
        refuse("mlp_only_layers or decoder_sparse_step")
    rope = model.rope_parameters
    if rope["rope_type"] not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(f"rope_type {rope['rope_type']} or a partial_rotary_factor")
    if rope["rope_type"] == "llama3" and any(rope.get(key) != value for key, value in _LLAMA3_ROPE.items()):
        refuse(f"llama3 rope parameters other than {_LLAMA3_ROPE}")
