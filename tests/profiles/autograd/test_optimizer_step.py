"""torch's fused optimizer steps: the same weights, and only where the kernel fits."""

from __future__ import annotations

import copy
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from timeprest.profiles.autograd.optimizer_step import fuse
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam


def trained(make, model, steps=4, *, fused):
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        model(x).square().mean().backward()
        if fused:
            assert fuse(optimizer)
            assert all(group["fused"] for group in optimizer.param_groups)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
        lambda p: Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
        lambda p: AdamW(p, lr=0.01),
    ],
)
def test_the_weights_are_the_same(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    plain, fused = (trained(make, model, fused=fused) for fused in (False, True))
    for name, tensor in plain.items():
        torch.testing.assert_close(fused[name], tensor, rtol=1e-12, atol=1e-12)


def with_gradients(*parameters):
    for p in parameters:
        p.grad = torch.ones_like(p)
    return list(parameters)


def weight(*shape):
    return nn.Parameter(torch.zeros(*shape))


def test_it_waits_until_all_gradients_are_there():
    first, second = weight(2), weight(2)
    optimizer = SGD([first, second], lr=0.1)
    with_gradients(first)
    assert not fuse(optimizer)
    with_gradients(second)
    assert fuse(optimizer)
    assert optimizer.param_groups[0]["fused"]


def test_what_the_user_chose_or_the_kernel_cant_take_stays():
    across = nn.Parameter(torch.zeros(2, 3).t())
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    for optimizer in (
        SGD(with_gradients(weight(2)), lr=0.1, foreach=True),
        Adam(with_gradients(weight(2)), fused=False),
        NAdam(with_gradients(weight(2))),
        SGD(with_gradients(across), lr=0.1),
        SGD(table.parameters(), lr=0.1),
    ):
        assert fuse(optimizer)
        assert not any(group.get("fused") for group in optimizer.param_groups)
        optimizer.step()


LOOKED_AT = dedent("""
    import sys, torch
    from timeprest.profiles.autograd.optimizer_step import made_without_compiler
    adds = torch.optim.Optimizer.add_param_group
    plain = adds.__wrapped__
    if sys.argv[1] == "otherwise":
        del adds.__wrapped__
    p = torch.nn.Parameter(torch.ones(2))
    with made_without_compiler():
        optimizer = torch.optim.SGD([p], lr=0.5)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    print("torch._dynamo" in sys.modules)
    p.grad = torch.ones(2)
    optimizer.step()
    optimizer.add_param_group({"params": torch.nn.Parameter(torch.ones(1))})
    print("torch._dynamo" in sys.modules, p.tolist(), len(optimizer.param_groups))
    with made_without_compiler():
        torch.optim.SGD([p], lr=0.5)
    # As torch left it: told not to look into it.
    print(vars(plain)["__dynamo_disable"] is not plain)
""")


@pytest.mark.choice(1)
@pytest.mark.parametrize(("torchs", "loaded"), [("own", "False"), ("otherwise", "True")])
def test_an_optimizer_to_be_looked_at_needs_no_compiler(torchs, loaded):
    """In a process of its own, since others load it; where torch keeps it otherwise all is as
    ever."""
    line = [sys.executable, "-c", LOOKED_AT, torchs]
    ran = subprocess.run(line, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [loaded, "True [0.5, 0.5] 2", "True"]
