"""Small weights that the tests publish."""

import torch


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{layer}.weight": torch.randn(16, 8, generator=generator) for layer in range(6)} | {
        "norm": torch.randn(8, generator=generator)
    }


def llama_like(seed: int = 0) -> dict[str, torch.Tensor]:
    """bfloat16 tensors by the names of a Llama of two layers: hidden 64, intermediate 96, 160 tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (160, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.self_attn.q_proj.weight": (64, 64),
            f"model.layers.{layer}.self_attn.q_proj.bias": (64,),
            f"model.layers.{layer}.self_attn.o_proj.weight": (64, 64),
            f"model.layers.{layer}.mlp.up_proj.weight": (96, 64),
            f"model.layers.{layer}.mlp.down_proj.weight": (64, 96),
        }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def stepped(weights: dict[str, torch.Tensor], seed: int, share: float = 0.1) -> dict[str, torch.Tensor]:
    """The weights with a share of the elements moved by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in weights.items():
        moved = torch.rand(tensor.shape, generator=generator) < share
        found[name] = (tensor.view(torch.int16) ^ moved.to(torch.int16)).view(tensor.dtype)
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )
