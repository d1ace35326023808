import pytest
import torch
from torch import nn

from tasks.train.trainers.linear import use_onednn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_output_and_every_gradient_are_those_of_the_plain_layer_in_float64(
    bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 4, bias=bias), torch.randn(shape)
    exact, exact_x = nn.Linear(5, 4, bias=bias).double(), x.double().requires_grad_()
    exact.load_state_dict(layer.state_dict())
    exact(exact_x).square().sum().backward()

    use_onednn(layer)
    ours_x = x.clone().requires_grad_()
    output = layer(ours_x)
    output.square().sum().backward()
    assert type(output.grad_fn).__name__ == "_OneDnnLinearBackward"
    torch.testing.assert_close(output.double(), exact(exact_x), rtol=1e-5, atol=1e-6)
    assert ours_x.grad is not None
    torch.testing.assert_close(ours_x.grad.double(), exact_x.grad, rtol=1e-5, atol=1e-5)
    for ours, reference in zip(layer.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-5, atol=1e-5)


def test_it_sees_weights_that_are_changed_in_place() -> None:
    layer = nn.Linear(3, 2, bias=False)
    use_onednn(layer)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    assert layer(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]


def test_layers_in_another_precision_are_left_alone() -> None:
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    use_onednn(layer)
    assert layer(torch.ones(1, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_no_rows_have_no_output_and_gradients_of_zero() -> None:
    layer = nn.Linear(3, 2)
    use_onednn(layer)
    x = torch.zeros(1, 0, 3, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    assert output.shape == (1, 0, 2)
    assert all(torch.equal(parameter.grad, torch.zeros_like(parameter)) for parameter in layer.parameters())
