"""The small policy itself: a Llama of a few million parameters, drawn from a seed."""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tasks.model.config import TinyModelConfig


def build_model(config: TinyModelConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A float32 model with tied embeddings, of the tokenizer's real vocabulary size.

    The same seed gives the same weights; the caller's random state is left as it was. `save_pretrained`
    writes its generation settings too, with the tokenizer's end token as the one that ends a turn.
    """
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.max_context,
        # The usual 0.02 suits widths of thousands; with it a narrow model is nearly linear and learns late.
        initializer_range=config.hidden_size**-0.5,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model
