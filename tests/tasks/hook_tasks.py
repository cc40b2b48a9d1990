"""Tasks whose hooks are wrong in one way each."""

from __future__ import annotations

import random

import torch
from mlp_task import MLPTask, ShortEpochs
from torch.utils.data import DataLoader


class OtherParameters(MLPTask):
    """The optimizer is over another model's parameters."""

    def optimizer(self, parameters):
        return torch.optim.SGD(self.model().parameters(), lr=0.05)


class WholeModel(MLPTask):
    """The optimizer is over the whole model at every stage."""

    def model(self):
        self.net = super().model()
        return self.net

    def optimizer(self, parameters):
        return torch.optim.SGD(self.net.parameters(), lr=0.05)


class LookedAt(MLPTask):
    """The model comes with the gradients of a first look at it."""

    def model(self):
        net = super().model()
        sum(p.square().sum() for p in net.parameters()).backward()
        return net


class MatricesAlone(MLPTask):
    """The optimizer leaves biases out."""

    def optimizer(self, parameters):
        return torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.05)


class OwnWeight(MLPTask):
    """The loss has a parameter of its own."""

    def __init__(self):
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def optimizer(self, parameters):
        return torch.optim.SGD([*parameters, self.scale], lr=0.05)


class NoOptimizer(MLPTask):
    """Forgets to return it."""

    def optimizer(self, parameters):
        torch.optim.SGD(parameters, lr=0.05)


class Misspelt:
    """The optimizer's name is wrong, and an optional method's."""

    model, data, loss = MLPTask.model, MLPTask.data, MLPTask.loss

    def optimiser(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)


class NoData:
    """There is nothing like it."""

    model, loss, optimizer = MLPTask.model, MLPTask.loss, MLPTask.optimizer


class MadeLater:
    """One method comes with the object."""

    model, data, optimizer = MLPTask.model, MLPTask.data, MLPTask.optimizer

    def __init__(self):
        self.loss = torch.nn.MSELoss()


class NoLoss(MLPTask):
    """Has the name and nothing behind it."""

    loss = None


class ModelItself(MLPTask):
    """Gives a model where a method that makes one belongs."""

    model = torch.nn.Linear(5, 3)


class Lightning(torch.nn.Module):
    """A model that knows its loss."""

    def loss(self, output, target):
        return ((output - target) ** 2).mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)


class Metric(MLPTask):
    """An optional method's name is wrong."""

    def metric(self, output, target):
        return {"error": (output - target).abs().mean()}


class Maker:
    """A function of a kind that makes models, and has data of its own."""

    data = ()

    def __call__(self):
        return MLPTask().model()


misspelt, make_model = Misspelt(), Maker()


class ModelNone(MLPTask):
    def model(self):
        super().model()


class DataOfSplits(MLPTask):
    def data(self, split):
        return {"train": super().data("train"), "test": super().data("test")}


class DataOnce(MLPTask):
    def data(self, split):
        return iter(DataLoader(super().data(split), batch_size=4))


class DataNone(MLPTask):
    def data(self, split):
        super().data(split)


class DataTensors(MLPTask):
    def data(self, split):
        return super().data(split).tensors


class TestDataNone(MLPTask):
    def data(self, split):
        return super().data(split) if split == "train" else None


class TestSampleRaises(MLPTask):
    """Test samples can't be read."""

    def data(self, split):
        return super().data(split) if split == "train" else self

    def __len__(self):
        return 4

    def __getitem__(self, k):
        raise OSError("no such file")


class Uneven(MLPTask):
    """Samples that no batch can be made of."""

    def data(self, split):
        x = torch.randn(600, 5, dtype=torch.float64)
        return [(x[k], torch.zeros(3 + k % 2)) for k in range(600)]


class LossNone(MLPTask):
    def loss(self, output, target):
        super().loss(output, target)


class LossRaises(MLPTask):
    def loss(self, output, target):
        return (output @ target).mean()


class OfModel(MLPTask):
    """The loss takes parameters of the model that don't come out of its forward."""

    def model(self):
        self.net = super().model()
        # No layer uses it.
        self.net.temperature = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        return self.net


class LossPenalty(OfModel):
    """Weight decay by hand: of every layer."""

    def loss(self, output, target):
        layers = [p for name, p in self.net.named_parameters() if name != "temperature"]
        return super().loss(output, target) + 0.05 * sum(p.square().sum() for p in layers)


class LossOfFirst(OfModel):
    """Of the first layer alone."""

    def loss(self, output, target):
        return super().loss(output, target) + 0.05 * self.net.l0.weight.square().sum()


class LossOfLast(OfModel):
    """Of the last one, which the loss's own stage has; as (sum, weight)."""

    def loss(self, output, target):
        found = super().loss(output, target) + 0.05 * self.net.l3.weight.square().sum()
        return found * len(output), len(output)


class LossOfItsOwn(OfModel):
    """A learned number that is no part of the model."""

    scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(self, output, target):
        return super().loss(output * self.scale, target)


class LossTemperature(OfModel):
    """A learned number that the loss alone uses."""

    def loss(self, output, target):
        return super().loss(output * self.net.temperature.exp(), target)


class LossDetached(MLPTask):
    def loss(self, output, target):
        return super().loss(output.detach(), target)


class MetricsNone(MLPTask):
    def metrics(self, output, target):
        pass


class MetricsRaise(MLPTask):
    def metrics(self, output, target):
        return {"product": output @ target}


class MetricsUnnamed(MLPTask):
    def metrics(self, output, target):
        return {1: (output - target).mean()}


class SchedulerText(MLPTask):
    def scheduler(self, optimizer):
        return "cosine"


class SchedulerRaises(MLPTask):
    """Only when it is stepped."""

    def scheduler(self, optimizer):
        def rate(update):
            return 1.0 if update == 0 else 1 / 0

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class Closure(MLPTask):
    """The optimizer computes the loss itself, several times a step."""

    def optimizer(self, parameters):
        return torch.optim.LBFGS(parameters)


class StepRaises(MLPTask):
    """Only when it is stepped."""

    def optimizer(self, parameters):
        def fail(*_):
            raise ZeroDivisionError

        found = torch.optim.SGD(parameters, lr=0.05)
        found.register_step_pre_hook(fail)
        return found


class StepsOfOneLength(MLPTask):
    """Of all that an optimizer has, whose gradients may be 0 nowhere."""

    def optimizer(self, parameters):
        def shorten(optimizer, *_):
            own = [p.grad for group in optimizer.param_groups for p in group["params"]]
            length = torch.stack([g.norm() for g in own]).norm()
            for g in own:
                g /= length

        found = torch.optim.SGD(parameters, lr=0.05)
        found.register_step_pre_hook(shorten)
        return found


class RowsRaise(MLPTask):
    """Its data set can't be read."""

    def data(self, split):
        found = super().data(split)

        class Rows(type(found)):
            def __getitem__(self, k):
                raise ValueError("bad sample")

        return Rows(*found.tensors)


class MetricsOfEach(MLPTask):
    """A figure for each sample."""

    def metrics(self, output, target):
        return {"error": (output - target).abs().mean(1)}


class FiguresOfNone(MLPTask):
    """A precision: in the first samples there are no positives."""

    def metrics(self, output, target):
        return {"positives": (target > 2).double().mean()}

    def figures(self, means):
        return {"precision": 0.0 / means["positives"]}


class MetricsLoss(MLPTask):
    """The loss among them, as a float: a habit of many loops."""

    def metrics(self, output, target):
        return {"loss": self.loss(output, target).item() + 1}


class MetricsCount(MLPTask):
    """One figure is a count."""

    def metrics(self, output, target):
        right = (output > 0) == (target > 0)
        return {"right": right.sum(), "accuracy": right.double().mean()}


class LossSum(MLPTask):
    def loss(self, output, target):
        return ((output - target) ** 2).sum()


class Unwritable(MLPTask):
    """An optimizer that keeps what no checkpoint can hold."""

    def optimizer(self, parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        optimizer.param_groups[0]["rule"] = self
        return optimizer


class Epochs(ShortEpochs):
    """Halves the learning rate after each epoch."""

    scheduler_step = "epoch"

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class Open(ShortEpochs):
    """Doesn't say when."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)


class ToldUpdate(Open):
    scheduler_step = "update"


class Cycled(ShortEpochs):
    """Of a class that torch's documentation steps after each update."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40)


class ShortCycle(ShortEpochs):
    """A schedule that ends before the run does."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)


class AskedCycle(ShortEpochs):
    """A schedule of the run's length."""

    def scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)


class InParts(ShortEpochs):
    """A rate that rises, and falls along half a cosine until the run ends."""

    def scheduler(self, optimizer, steps):
        rises = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=2)
        falls = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - 2)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [rises, falls], [2])


class Chained(ShortEpochs):
    """Two rules at once, one of the run's length."""

    def scheduler(self, optimizer, steps):
        first = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        second = torch.optim.lr_scheduler.PolynomialLR(optimizer, steps, power=2.0)
        return torch.optim.lr_scheduler.ChainedScheduler([first, second])


class EpochTotals(ShortEpochs):
    """Stepped after each epoch, of which the run has so many."""

    scheduler_step = "epoch"

    def scheduler(self, optimizer, steps, steps_per_epoch):
        return torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.1, total_iters=-(-steps // steps_per_epoch)
        )


class Fixed(ShortEpochs):
    """As long as a run of four updates."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)


class FixedCosine(ShortEpochs):
    """The same in two parts."""

    def scheduler(self, optimizer):
        return InParts.scheduler(self, optimizer, 4)


class FixedEpochs(ShortEpochs):
    """As long as a run of one epoch."""

    scheduler_step = "epoch"

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.PolynomialLR(optimizer, 1)


class WarmedUp(ShortEpochs):
    """A rate that has risen long before the end."""

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=2)


class Drawn(torch.optim.lr_scheduler.LRScheduler):
    """A rate that nobody can have again."""

    def get_lr(self):
        self.drawn = [random.random() for _ in self.base_lrs]
        return [lr * drawn for lr, drawn in zip(self.base_lrs, self.drawn, strict=True)]


class DrawnTotals(ShortEpochs):
    def scheduler(self, optimizer, steps):
        return Drawn(optimizer)


class Warmed(ShortEpochs):
    """A rate that rises over a tenth of the run."""

    def scheduler(self, optimizer, steps):
        warmup = steps // 10
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / warmup))


class Totals(ShortEpochs):
    """Asks how long the run is."""

    def scheduler(self, optimizer, steps_per_epoch, steps):
        rates = {"steps": steps, "steps_per_epoch": steps_per_epoch}
        self.told = rates
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)


class OddStep(Epochs):
    scheduler_step = "epochs"


class OddTotals(ShortEpochs):
    def scheduler(self, optimizer, epochs):
        return None


class Plateau(ShortEpochs):
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


class OtherOptimizer(ShortEpochs):
    def scheduler(self, optimizer):
        other = self.optimizer([torch.nn.Parameter(torch.zeros(1))])
        return torch.optim.lr_scheduler.StepLR(other, 2)


class _NoTextError(Exception):
    def __str__(self):
        raise GeneratorExit


class Ending(MLPTask):
    """The optimizer's third step raises what ends programs, or has no text."""

    raises = SystemExit(0)

    def optimizer(self, parameters):
        found = torch.optim.SGD(parameters, lr=0.05)
        found.register_step_pre_hook(self._count)
        self.steps = 0
        return found

    def _count(self, *_):
        self.steps += 1
        if self.steps == 3:
            raise self.raises


class EndingByGeneratorExit(Ending):
    """As said."""

    raises = GeneratorExit()


class EndingByItsOwn(Ending):
    """A class of its own."""

    raises = type("Mine", (BaseException,), {})("text")


class EndingWithoutText(Ending):
    """Its __str__ raises."""

    raises = _NoTextError()


class EndingModel(MLPTask):
    """Building it ends the program."""

    def model(self):
        raise SystemExit(0)


class EndingForward(MLPTask):
    """The model's forward does."""

    def model(self):
        class Ends(torch.nn.Sequential):
            def forward(self, x):
                raise SystemExit(0)

        return Ends(super().model())


class Adagrad(MLPTask):
    """Without momentum of any kind."""

    def optimizer(self, parameters):
        return torch.optim.Adagrad(parameters, lr=0.05)


class CyclingMomentum(MLPTask):
    """Its scheduler sets the momentum."""

    def scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps + 1)
