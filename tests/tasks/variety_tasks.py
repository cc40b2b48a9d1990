"""Small models of many shapes, as tasks: what a pipeline must train as one process does."""

from __future__ import annotations

import numpy as np
import torch
from mlp_task import WIDTHS, MLPTask
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

SAMPLES = 24


def drawn(seed, *shape):
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed)).double()


def words(seed, below, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, below, (SAMPLES, *shape), generator=generator)


class _Task:
    """Cross-entropy over classes, SGD with momentum, of a `Model` in double precision."""

    def model(self):
        return self.Model().double()

    def loss(self, output, target):
        return functional.cross_entropy(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2)


# A residual net of ResNet-50's form: bottlenecks, batch norms, projections on shortcuts ---------


class Bottleneck(nn.Module):
    def __init__(self, inside, width, stride, act):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride > 1 or inside != 4 * width:
            self.down = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """The blocks of one of ResNet-50's groups, twice."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Bottleneck(4, 2, 1, None), Bottleneck(8, 2, 1, None))
        self.layer2 = nn.Sequential(Bottleneck(8, 3, 2, None), Bottleneck(12, 3, 1, None))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(12, 5)

    def forward(self, images):
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(images)))))
        return self.fc(torch.flatten(self.pool(x), 1))


class ResNetTask(_Task):
    Model = ResNet

    def data(self, split):
        return TensorDataset(drawn(1, 3, 6, 6), words(2, 5))


# GPT-2: embeddings with positions, causal attention, dropout, and a tied head -------------------

VOCABULARY, LENGTH, WIDTH = 11, 6, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.all(x).split(width, 2)
        q, k, v = (t.view(batch, length, 2, width // 2).transpose(1, 2) for t in (q, k, v))
        rate = 0.1 if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("positions", torch.arange(LENGTH))
        self.h = nn.Sequential(Block(), Block())
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.ln(self.h(self.wte(tokens) + self.wpe(self.positions))))


class GPTTask(_Task):
    Model = GPT

    def data(self, split):
        tokens = words(3, VOCABULARY, LENGTH + 1)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def loss(self, output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01)


class TiedGPT(GPT):
    """The head's weights are the embedding's."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.wte.weight


class TiedTask(GPTTask):
    Model = TiedGPT


class DecayedEmbeddingTask(TiedTask):
    """Weight decay for the embedding, which a head's stage knows as its own weight."""

    def parameter_groups(self, named):
        return [
            {"params": [p for name, p in named if name == "wte.weight"], "weight_decay": 0.5},
            {"params": [p for name, p in named if name != "wte.weight"], "weight_decay": 0.0},
        ]


class TiedByCallTask(GPTTask):
    """The head is a function of the embedding's weights, and the embedding is called twice."""

    class Model(GPT):
        def __init__(self):
            super().__init__()
            self.head = None

        def forward(self, tokens):
            x = self.h(self.wte(tokens) + self.wpe(self.positions))
            x = self.ln(x + self.wte(tokens.flip(1)))
            return functional.linear(x, self.wte.weight)


# Skips, several inputs, integers and tensors without gradients across cuts ----------------------


class Skips(nn.Module):
    """A U: what early layers make goes over two stages or more, several tensors at each cut."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Linear(6, 8), nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.up2, self.up1 = nn.Linear(16, 8), nn.Linear(14, 4)

    def forward(self, x):
        a = torch.tanh(self.down1(x))
        b = torch.tanh(self.down2(a))
        c = torch.tanh(self.middle(b)) * a
        d = torch.tanh(self.up2(torch.cat([c, b], 1)))
        return self.up1(torch.cat([d, x], 1)) + a[:, :4]


class SkipsTask(_Task):
    Model = Skips

    def data(self, split):
        return TensorDataset(drawn(4, 6), words(5, 4))


class Masked(nn.Module):
    """Tokens and a mask; what is counted (integers) and compared (booleans) crosses cuts too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 3)
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, tokens, mask):
        counts = mask.sum(1, keepdim=True)
        odd = tokens % 2 == 1
        with torch.no_grad():
            still = self.embed(tokens).sum(2, keepdim=True)
        x = torch.tanh(self.first(self.embed(tokens)))
        idle = self.unused(x)
        y = torch.tanh(self.second(x)).masked_fill(odd.unsqueeze(2), 0.5)
        y = self.third(y) * mask.unsqueeze(2) / counts.unsqueeze(2)
        y = y + x * torch.sigmoid(still)
        return {"scores": self.out(y), "weights": mask, "idle": idle, "hidden": x}


class Pairs(Dataset):
    """Tokens and a mask with at least one word; the loss needs both again."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, k):
        tokens = words(6, VOCABULARY, LENGTH)[k]
        mask = (words(7, 3, LENGTH)[k] > 0).long()
        mask[0] = 1
        return {"tokens": tokens, "mask": mask}, {"words": tokens.flip(0), "mask": mask}


class MaskedTask(_Task):
    """A mean over the words of each sample, then over samples."""

    Model = Masked

    def data(self, split):
        return Pairs()

    def loss(self, output, target):
        each = functional.cross_entropy(
            output["scores"].transpose(1, 2), target["words"], reduction="none"
        )
        mask = target["mask"]
        return ((each * mask).sum(1) / mask.sum(1)).mean() + output["hidden"].square().mean()


class WordMeanTask(MaskedTask):
    """A mean over all words of a batch: not a mean over its samples."""

    def loss(self, output, target):
        each = functional.cross_entropy(
            output["scores"].transpose(1, 2), target["words"], reduction="none"
        )
        return (each * target["mask"]).sum() / target["mask"].sum()


class WordSumTask(WordMeanTask):
    """The same mean, told as the sum and the number of words."""

    def loss(self, output, target):
        words = target["mask"].sum()
        return super().loss(output, target) * words, words


class Frozen(nn.Module):
    """Layers that aren't trained, at the front and in between: a stage may have none that are."""

    def __init__(self):
        super().__init__()
        self.front = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.between = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.ones(3))
        for p in (*self.front.parameters(), *self.between.parameters()):
            p.requires_grad_(False)

    def forward(self, x):
        x = self.norm(torch.tanh(self.front(x)))
        return self.last(torch.tanh(self.between(x)))


class FrozenTask(_Task):
    Model = Frozen

    def data(self, split):
        return TensorDataset(drawn(8, 6), words(9, 4))


class FrozenNorm(nn.Module):
    """A batch norm with the statistics that it came with, as in fine-tuning, whatever the mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        with torch.no_grad():
            self.norm.running_mean.fill_(0.25)
            self.norm.running_var.fill_(2.0)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class FrozenNormTask(_Task):
    Model = FrozenNorm

    def data(self, split):
        return TensorDataset(drawn(5, 6), words(6, 3))


class Shifted(nn.Module):
    """Zeros that a batch norm takes away again: their gradients are rounding errors."""

    def __init__(self):
        super().__init__()
        self.first, self.between, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        nn.init.zeros_(self.between.bias)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.between(torch.tanh(self.first(x))))))


class ShiftedTask(FrozenNormTask):
    Model = Shifted


class Treated(nn.Module):
    """A weight with a hook on its gradient, which the optimizer treats apart by an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.between = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.again.weight = self.first.weight
        self.first.weight.register_hook(lambda gradient: gradient * 0.3)
        self.first.weight.decays = 0.5
        # One that was frozen since takes no hooks any more.
        self.between.bias.register_hook(torch.zeros_like)
        self.between.bias.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.between(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.again(x)))


class TreatedTask(FrozenNormTask):
    Model = Treated

    def optimizer(self, parameters):
        groups = [{"params": [p], "weight_decay": getattr(p, "decays", 0.0)} for p in parameters]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Remembering(nn.Linear):
    """Keeps a number where checkpoints of torch would have it."""

    def get_extra_state(self):
        return {"calls": 0}

    def set_extra_state(self, state):
        pass


class ExtraStateTask(FrozenNormTask):
    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Remembering(8, 3)).double()


class ComplexTask(FrozenNormTask):
    def model(self):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        model[2].register_buffer("phase", torch.ones(3, dtype=torch.complex128))
        return model


class Turned(nn.Module):
    """Complex numbers, a weight of which is conjugated, and what a layer makes is, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(10, 3)
        self.inside = nn.Linear(5, 5, dtype=torch.complex64)
        self.between = nn.Linear(5, 5, dtype=torch.complex64)

    def forward(self, x):
        z = torch.fft.rfft(torch.tanh(self.first(x)))
        z = self.between(self.inside(z).conj() * self.inside.bias.conj())
        return self.last(torch.cat([z.real, z.imag], 1))


class TurnedTask(FrozenNormTask):
    def model(self):
        return Turned()

    def data(self, split):
        x, y = super().data(split).tensors
        return TensorDataset(x.float(), y)


class Slope(nn.Module):
    """Of its inputs, as physics-informed networks take it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(6, 3)

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_()
            energy = functional.softplus(self.first(x)).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.last(slope)


class SlopeTask(FrozenNormTask):
    Model = Slope


class Weakened(torch.autograd.Function):
    """Half of the gradient, with another sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -0.5 * gradient


class OwnBackward(nn.Module):
    """A custom backward, and a checkpoint of the kind that hides what it computes."""

    def __init__(self):
        super().__init__()
        self.inside, self.between = nn.Linear(6, 8), nn.Linear(8, 8)
        self.last, self.out = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        h = checkpoint(self.between, torch.tanh(self.inside(x)), use_reentrant=True)
        return self.out(torch.tanh(self.last(Weakened.apply(h)) * 2))


class Counted(nn.Module):
    """Buffers that a forward writes: a mean of what goes through, and how often."""

    def __init__(self):
        super().__init__()
        self.inside, self.between, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = torch.tanh(self.inside(x))
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
            self.calls += 1
        return self.out(torch.tanh(self.between(h - self.mean)))


class Written(nn.Module):
    """A tensor that is made empty, and gets its gradient by what is written into it."""

    def __init__(self):
        super().__init__()
        self.inside, self.between, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        h = torch.tanh(self.between(torch.tanh(self.inside(x))))
        made = torch.zeros(x.shape[0], 8, dtype=x.dtype)
        made[:, :4] = h[:, 4:]
        return self.out(made)


class OwnBackwardTask(_Task):
    Model = OwnBackward

    def data(self, split):
        return TensorDataset(drawn(1, 6), words(2, 5))


class CountedTask(OwnBackwardTask):
    Model = Counted


class WrittenTask(OwnBackwardTask):
    Model = Written


class ReturningTask(SkipsTask):
    """Returns its first weight, of which the loss has a penalty."""

    class Model(Skips):
        def forward(self, x):
            return super().forward(x), self.down1.weight

    def loss(self, output, target):
        scores, weight = output
        return super().loss(scores, target) + 0.1 * weight.square().sum()


class DrawingTask(SkipsTask):
    """Adds noise of its own while it trains."""

    class Model(Skips):
        def forward(self, x):
            return super().forward(x + 0.1 * torch.randn_like(x))


class WeightNormTask(MLPTask):
    """Weights that each forward computes, and leaves in an attribute."""

    def model(self):
        first, last = nn.Linear(WIDTHS[0], 6), nn.Linear(6, WIDTHS[-1])
        return nn.Sequential(nn.utils.weight_norm(first), nn.Tanh(), last).double()


class Shifts(nn.Module):
    """Of one sample, gradients of both are views of the same one."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x + self.one.unsqueeze(0) + self.two.unsqueeze(0)


class ShiftsTask(MLPTask):
    def model(self):
        first, last = nn.Linear(WIDTHS[0], 6), nn.Linear(6, WIDTHS[-1])
        return nn.Sequential(first, Shifts(), nn.Tanh(), Shifts(), nn.Tanh(), last).double()


class SumOfBoth(nn.Module):
    """Two layers' results get one gradient, to the first of which a later layer adds its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTHS[0], 6), nn.Linear(WIDTHS[0], 6)
        self.sum, self.skip = nn.Identity(), nn.Linear(6, WIDTHS[-1])
        self.last = nn.Linear(6, WIDTHS[-1])

    def forward(self, x):
        one, two = self.one(x), self.two(x)
        return self.last(torch.tanh(self.sum(one) + two)) + self.skip(one)


class SumOfBothTask(MLPTask):
    def model(self):
        return SumOfBoth().double()


class Query(nn.Module):
    """Gives a parameter, itself or computed."""

    def __init__(self, itself):
        super().__init__()
        self.query, self.itself = nn.Parameter(torch.ones(6)), itself

    def forward(self, x):
        return self.query if self.itself else self.query * 1


class Queried(nn.Module):
    def __init__(self, itself):
        super().__init__()
        self.ask = Query(itself)
        self.first, self.last = nn.Linear(WIDTHS[0], 6), nn.Linear(6, WIDTHS[-1])

    def forward(self, x):
        query = self.ask(x)
        return self.last(torch.tanh(self.first(x)) * query)


class QueryTask(MLPTask):
    def model(self):
        return Queried(True).double()


class ComputedQueryTask(MLPTask):
    def model(self):
        return Queried(False).double()


class Mixed(nn.Module):
    """float32 first, float64 then; the shift is used, but nothing is learnt for it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTHS[0], 6)
        self.act = nn.Tanh()
        self.shift = nn.Parameter(torch.ones(6))
        self.second = nn.Linear(6, WIDTHS[-1]).double()

    def forward(self, x):
        y = self.act(self.first(x.float())) + self.shift.detach()
        return self.second(y.double())


class MixedTask(MLPTask):
    """AdamW moves what has a gradient of zero, by its weight decay, but not what has none."""

    def model(self):
        return Mixed()

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


# Hugging Face models inside modules of one's own ------------------------------------------------


class Logits(nn.Module):
    """The scores of a language model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, input_ids, attention_mask):
        return self.net(input_ids=input_ids, attention_mask=attention_mask)["logits"]


class Scaled(Logits):
    """With a parameter that the model inside doesn't have."""

    def __init__(self, net):
        super().__init__(net)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids, attention_mask):
        return self.scale * super().forward(input_ids, attention_mask)


class WrappedTask:
    """GPT-2 in a module that gives its scores."""

    wrapper = Logits

    def __init__(self):
        from timeprest.profiles.hugging_face.task import make_task

        self.inner = make_task("hf", "gpt2,hidden_size=16,num_hidden_layers=1")

    def model(self):
        return self.wrapper(self.inner.model())

    def data(self, split):
        return self.inner.data(split)

    def loss(self, output, target):
        return self.inner.loss(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1)


class ScaledTask(WrappedTask):
    """The same with a parameter beside it."""

    wrapper = Scaled


# Random numbers of the model's own: they go by samples where runs are held against each other -----


def drop_path(x, keep):
    """As in timm."""
    return x * x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(keep) / keep


class Path(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return x + (drop_path(y, 0.5) if self.training else y)


class Paths(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Path(), Path(), Path()), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.blocks(x))


class DropPath(_Task):
    Model = Paths

    def data(self, split):
        x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
        return TensorDataset(x, x[:, :3].argmax(1))


class Encoder(nn.Module):
    """A VAE's: mean, spread and a number of noise for each."""

    def __init__(self):
        super().__init__()
        self.first, self.mean, self.spread = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.back, self.out = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.exp(0.5 * spread) * torch.randn_like(spread)
        return self.out(torch.tanh(self.back(z))), mean, spread


class VAE(DropPath):
    Model = Encoder

    def data(self, split):
        x = super().data(split).tensors[0]
        return TensorDataset(x, x)

    def loss(self, output, target):
        x, mean, spread = output
        apart = (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        return (x - target).square().mean() - 0.01 * apart


class Denoiser(nn.Module):
    """A diffusion's step: a time for each sample, noise, and a guess at it."""

    def __init__(self):
        super().__init__()
        self.times, self.first = nn.Embedding(10, 6), nn.Linear(6, 16)
        self.middle, self.last = nn.Linear(16, 16), nn.Linear(16, 6)

    def forward(self, x):
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn(x.shape[0], 6, dtype=x.dtype)
        kept = (t.to(x.dtype) / 10).unsqueeze(1)
        x = self.times(t) + kept * x + (1 - kept) * noise
        guess = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return guess, noise


class Diffusion(VAE):
    Model = Denoiser

    def loss(self, output, target):
        guess, noise = output
        return (guess - noise).square().mean()


class Wide(nn.Module):
    """Numbers in other places: one for all samples, several of each, not in front."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x * (0.5 + torch.rand(1, dtype=x.dtype)))
        x = x.view(-1, 4)
        x = self.middle(torch.tanh((x + 0.1 * torch.rand_like(x)).view(-1, 8)))
        x = x.t() + 0.1 * torch.normal(torch.zeros_like(x.t()), 1.0)
        gate = functional.gumbel_softmax(x.t(), tau=2.0)
        return self.last(gate * torch.bernoulli(torch.sigmoid(x.t())))


class Everywhere(DropPath):
    Model = Wide


class PathAgain(Path):
    """Computed again by the model itself."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Checkpointed(DropPath):
    def model(self):
        model = Paths()
        model.blocks[1] = PathAgain()
        return model.double()


class NoisyLoss(DropPath):
    """And once more beside the model's."""

    def loss(self, output, target):
        return functional.cross_entropy(output + 0.1 * torch.randn_like(output), target)


class HiddenLoss(DropPath):
    def model(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def loss(self, output, target):
        noise = torch.from_numpy(np.random.standard_normal(tuple(output.shape)))
        return functional.cross_entropy(output + noise, target)


class NoisySteps(HiddenLoss):
    def loss(self, output, target):
        return functional.cross_entropy(output, target)

    def optimizer(self, parameters):
        def add_noise(optimizer, *_):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad.add_(torch.randn_like(p))

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_pre_hook(add_noise)
        return optimizer
