"""The model zoo: published sizes, meaning, traceability, data, and wrong arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.models.built_in import batch, built_in, count
from timeprest.profiles.errors import TargetError
from torch import fx, nn
from torch.nn import functional
from torch.utils.data import default_collate

PUBLISHED = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "inception_v3": 27_161_264,
    "densenet121": 7_978_856,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
}
SMALL = {
    "alexnet": "size=63,classes=5",
    "vgg11": "size=32,classes=5",
    "resnet18": "size=32,classes=5",
    "resnet50": "size=32,classes=5",
    "inception_v3": "size=96,classes=5",
    "densenet121": "size=32,classes=5",
    "mlp": "width=16,depth=3,inputs=9,classes=5",
    "gpt2": "layers=2,width=64,heads=4,vocabulary=100,context=16",
    "bert-base": "layers=2,width=64,heads=4,vocabulary=100,context=16,length=12",
    "gnmt": "layers=3,width=16,vocabulary=40,length=6",
}
SHAPES = {
    "inception_v3": [(2, 5), (2, 5)],
    "gpt2": [(2, 16, 100)],
    "bert-base": [(2, 12, 100), (2, 2)],
    "gnmt": [(2, 6, 40)],
}


def on_meta(name, argument=None):
    with torch.device("meta"):
        return built_in(name, argument).model()


def tensors(output):
    return [v for v in torch.utils._pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    model = on_meta(name)
    assert count(model) == PUBLISHED[name]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_encoder_of_bert_has_its_published_size():
    assert count(on_meta("bert-base").bert) == 109_482_240
    assert count(on_meta("bert-large").bert) == 335_141_888


def test_gnmt_has_the_size_of_its_description():
    layers, w, tokens = 8, 1024, 32000

    def lstm(inside):
        return 4 * w * (inside + w + 2)

    encoder = 2 * lstm(w) + lstm(2 * w) + (layers - 2) * lstm(w)
    decoder = lstm(w) + (layers - 1) * lstm(2 * w)
    attention = 2 * w * w + w
    assert count(on_meta("gnmt")) == (
        encoder + decoder + attention + 2 * tokens * w + (w + 1) * tokens
    )


def test_mlp_has_the_size_of_its_description():
    assert count(on_meta("mlp")) == 785 * 1024 + 1025 * 1024 + 1025 * 10
    assert count(on_meta("mlp", "depth=1,width=3,inputs=5,classes=2")) == 6 * 3 + 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize("fake", [False, True])
def test_the_shape_of_gpt3_can_be_built(fake):
    from torch._subclasses.fake_tensor import FakeTensorMode

    layers, w, tokens, context = 96, 12288, 50257, 2048
    with FakeTensorMode() if fake else torch.device("meta"):
        model = built_in(
            "gpt2", f"layers={layers},width={w},heads=96,vocabulary={tokens},context={context}"
        ).model()
        scores = model(torch.zeros(1, context, dtype=torch.int64)) if not fake else None
    per_layer = 12 * w * w + 13 * w
    assert count(model) == (tokens + context) * w + layers * per_layer + 2 * w
    assert scores is None or scores.shape == (1, context, tokens)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50", "densenet121", "inception_v3"])
def test_images_of_the_usual_size_give_a_thousand_scores(name):
    with torch.device("meta"):
        side = 299 if name == "inception_v3" else 224
        output = on_meta(name)(torch.zeros(2, 3, side, side))
    assert [tuple(scores.shape) for scores in tensors(output)] in ([(2, 1000)], [(2, 1000)] * 2)


@pytest.mark.choice(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_computes_traces_and_learns(name):
    task = built_in(name, SMALL[name])
    torch.manual_seed(0)
    model = task.model().train()
    inputs, _, target = batch(task)
    traced = fx.symbolic_trace(model)
    torch.manual_seed(1)
    output = model(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(traced(*inputs), output, rtol=0, atol=0)
    assert [tuple(v.shape) for v in tensors(output)] == SHAPES.get(name, [(2, 5)])
    task.loss(output, target).backward()
    untouched = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.any()
    ]
    assert not untouched
    assert 0 <= task.metrics(output, target)["accuracy"] <= 1
    assert isinstance(task.optimizer(model.parameters()), torch.optim.Optimizer)


@pytest.mark.parametrize("name", ["gpt2", "bert-base", "gnmt", "resnet18"])
def test_evaluation_traces_without_dropout_to_the_same_layers(name):
    model = built_in(name, SMALL[name]).model()
    training = fx.symbolic_trace(model.train())
    evaluation = fx.symbolic_trace(model.eval())
    assert [n.name for n in training.graph.nodes] == [n.name for n in evaluation.graph.nodes]
    inputs, _, _ = batch(built_in(name, SMALL[name]))
    first, second = tensors(evaluation(*inputs)), tensors(evaluation(*inputs))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_the_loss_falls_in_training(name):
    task = built_in(name, SMALL[name])
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = task.optimizer(model.parameters())
    inputs, _, target = batch(task, 32)
    losses = []
    for _ in range(30):
        loss = task.loss(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_the_same_seed_gives_the_same_weights():
    task = built_in("bert-base", SMALL["bert-base"])
    torch.manual_seed(3)
    first = task.model().state_dict()
    torch.manual_seed(3)
    torch.testing.assert_close(task.model().state_dict(), first, rtol=0, atol=0)


def test_gpt2_starts_as_its_authors_say():
    torch.manual_seed(0)
    model = built_in("gpt2", "layers=8,width=128,heads=4,vocabulary=500,context=16").model()
    assert model.lm_head.weight is model.wte.weight
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    block = model.h[3]
    assert block.mlp_in.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp_out.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert block.attn.out.weight.std().item() == pytest.approx(0.02 / 16**0.5, rel=0.05)
    assert not block.attn.out.bias.any()


def rename(state, table):
    """Our names to Hugging Face's."""
    found = {}
    for name, tensor in state.items():
        for ours, theirs in table:
            name = name.replace(ours, theirs)
        found[name] = tensor
    return found


def test_gpt2_computes_what_hugging_faces_does():
    transformers = pytest.importorskip("transformers")
    task = built_in("gpt2", SMALL["gpt2"])
    model = task.model().eval()
    table = [("mlp_in", "mlp.c_fc"), ("mlp_out", "mlp.c_proj")]
    table += [("attn.qkv", "attn.c_attn"), ("attn.out", "attn.c_proj")]
    state = rename(model.state_dict(), table)
    # Theirs multiply by the weight, ours by its transpose.
    state = {k: v.T if ".c_" in k and v.dim() == 2 else v for k, v in state.items()}
    state = {k if k == "lm_head.weight" else f"transformer.{k}": v for k, v in state.items()}
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(state)
    inputs, _, _ = batch(task)
    torch.testing.assert_close(model(*inputs), theirs(*inputs).logits)


def test_bert_computes_what_hugging_faces_does():
    transformers = pytest.importorskip("transformers")
    task = built_in("bert-base", SMALL["bert-base"])
    model = task.model().eval()
    state = {}
    for name, tensor in model.state_dict().items():
        if "attention.qkv" in name:
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                state[name.replace("qkv", f"self.{part}")] = piece
        else:
            state[name] = tensor
    table = [("bert.layer.", "bert.encoder.layer."), ("attention.out", "attention.output.dense")]
    table += [("norm_1", "attention.output.LayerNorm"), ("norm_2", "output.LayerNorm")]
    table += [("intermediate", "intermediate.dense"), (".output.weight", ".output.dense.weight")]
    table += [(".output.bias", ".output.dense.bias"), ("pooler", "pooler.dense")]
    table += [(f"bert.{k}_embed", f"bert.embeddings.{k}_embed") for k in ("word", "position")]
    table += [("bert.token_type", "bert.embeddings.token_type")]
    table += [("bert.norm.", "bert.embeddings.LayerNorm.")]
    state = rename(state, table)
    heads = [("order.", "cls.seq_relationship."), ("decoder.", "cls.predictions.decoder.")]
    heads += [("transform.", "cls.predictions.transform.dense.")]
    heads += [("norm.", "cls.predictions.transform.LayerNorm.")]
    state = {
        k
        if k.startswith("bert.")
        else next(k.replace(a, b) for a, b in heads if k.startswith(a)): v
        for k, v in state.items()
    }
    state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=16,
    )  # fmt: skip
    theirs = transformers.BertForPreTraining(config).eval()
    theirs.load_state_dict(state)
    (tokens, types, mask), _, _ = batch(task, 6)
    assert not mask.all()
    output = model(tokens, types, mask)
    expected = theirs(tokens, attention_mask=mask, token_type_ids=types)
    torch.testing.assert_close(output["tokens"], expected.prediction_logits)
    torch.testing.assert_close(output["order"], expected.seq_relationship_logits)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_computes_what_hugging_faces_does(name):
    transformers = pytest.importorskip("transformers")
    deep = name == "resnet50"
    model = built_in(name, "classes=5").model().eval()
    state = {}
    for key, tensor in model.state_dict().items():
        first, *rest, last = key.split(".")
        if first == "fc":
            state[f"classifier.1.{last}"] = tensor
            continue
        kind = "convolution" if tensor.dim() == 4 else "normalization"
        if not first.startswith("layer"):
            state[f"resnet.embedder.embedder.{kind}.{last}"] = tensor
            continue
        part = "shortcut" if rest[1] == "downsample" else f"layer.{int(rest[1][-1]) - 1}"
        stage = f"resnet.encoder.stages.{int(first[-1]) - 1}.layers.{rest[0]}"
        state[f"{stage}.{part}.{kind}.{last}"] = tensor
    config = transformers.ResNetConfig(
        hidden_sizes=[256, 512, 1024, 2048] if deep else [64, 128, 256, 512],
        depths=[3, 4, 6, 3] if deep else [2, 2, 2, 2],
        layer_type="bottleneck" if deep else "basic",
        num_labels=5,
    )
    theirs = transformers.ResNetForImageClassification(config).eval()
    theirs.load_state_dict(state)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), theirs(images).logits)


@pytest.mark.parametrize("name", ["gpt2", "gnmt"])
def test_no_position_sees_a_later_token(name):
    task = built_in(name, SMALL[name])
    model = task.model().eval()
    inputs, _, _ = batch(task)
    changed = inputs[-1].clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 40
    before, after = model(*inputs), model(*inputs[:-1], changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_inception_adds_four_tenths_of_the_auxiliary_loss():
    task = built_in("inception_v3", SMALL["inception_v3"])
    scores, auxiliary, labels = torch.randn(3, 5), torch.randn(3, 5), torch.tensor([0, 4, 2])
    expected = functional.cross_entropy(scores, labels)
    expected = expected + 0.4 * functional.cross_entropy(auxiliary, labels)
    torch.testing.assert_close(task.loss((scores, auxiliary), labels), expected)


def test_samples_weigh_alike_whatever_they_leave_out():
    from timeprest.profiles.zoo.synthetic import IGNORED, token_loss

    scores = torch.randn(4, 6, 9)
    labels = torch.randint(0, 9, (4, 6))
    labels[1, 2:] = IGNORED
    labels[2, :5] = IGNORED
    losses = [token_loss(scores[k : k + 1], labels[k : k + 1]) for k in range(4)]
    torch.testing.assert_close(token_loss(scores, labels), torch.stack(losses).mean())
    expected = functional.cross_entropy(scores[1, :2], labels[1, :2])
    torch.testing.assert_close(losses[1], expected)


@pytest.mark.parametrize("name", SMALL)
def test_samples_depend_on_their_index_alone(name):
    task, again = built_in(name, SMALL[name]), built_in(name, SMALL[name])
    random_state = torch.get_rng_state()
    data, test = task.data("train"), task.data("test")
    assert (len(data), len(test)) == (2048, 256)
    torch.testing.assert_close(data[7], again.data("train")[7], rtol=0, atol=0)
    assert any((a != b).any() for a, b in zip(tensors(data[7]), tensors(data[8]), strict=True))
    assert any((a != b).any() for a, b in zip(tensors(data[7]), tensors(test[7]), strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    for index in (-1, 2048):
        with pytest.raises(IndexError):
            data[index]


def test_samples_of_bert_hide_and_pad():
    data = built_in("bert-base", "layers=1,vocabulary=50,length=40").data("train")
    orders = set()
    for k in range(30):
        (tokens, types, mask), target = data[k]
        hidden = target["tokens"] != -100
        used = int(mask.sum())
        assert 30 <= used <= 40
        assert (mask[:used] == 1).all()
        assert (tokens[used:] == 0).all()
        assert not types[used:].any()
        assert hidden.sum() == round(0.15 * used)
        assert not hidden[used:].any()
        assert (tokens[hidden] == 1).all()
        assert int(tokens.max()) < 50
        orders.add(int(target["order"]))
    assert orders == {0, 1}


@pytest.mark.parametrize(
    ("name", "argument", "words"),
    [
        ("vgg16", "sise=32", ["vgg16", "sise", "size", "classes"]),
        ("vgg16", "size=16", ["vgg16", "size=16", "32"]),
        ("alexnet", "size=62", ["alexnet", "size=62", "63"]),
        ("inception_v3", "size=74", ["inception_v3", "size=74", "75"]),
        ("resnet50", "size=big", ["resnet50", "size=big"]),
        ("resnet50", "size=-1", ["resnet50", "size=-1"]),
        ("resnet50", "classes=0", ["resnet50", "classes=0"]),
        ("resnet50", "size", ["resnet50", "size", "key=value"]),
        ("resnet50", "size=64,size=32", ["resnet50", "size", "twice"]),
        ("resnet50", "size=64,", ["resnet50", "key=value"]),
        ("densenet121", "size=" + "9" * 5000, ["densenet121", "size"]),
        ("gpt2", "width=65", ["gpt2", "width=65", "heads=12"]),
        ("gpt2-xl", "length=2000", ["gpt2-xl", "length=2000", "context=1024"]),
        ("gpt2", "dropout=1", ["gpt2", "dropout=1"]),
        ("gpt2", "dropout=nan", ["gpt2", "dropout=nan"]),
        ("gpt2", "layers=1e3", ["gpt2", "layers=1e3"]),
        ("gpt2", "layers=1001", ["gpt2", "layers=1001"]),
        ("bert-base", "length=513", ["bert-base", "length=513", "context=512"]),
        ("bert-large", "heads=7", ["bert-large", "width=1024", "heads=7"]),
        ("gnmt", "layers=1", ["gnmt", "layers=1", "2"]),
        ("mlp", "size=3", ["mlp", "size", "width", "depth", "inputs", "classes"]),
    ],
)
def test_wrong_arguments_are_named(name, argument, words):
    with pytest.raises(TargetError) as caught:
        built_in(name, argument)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words)


def test_asking_for_names_imports_no_model():
    code = (
        "import sys; from timeprest.profiles import plugins\n"
        "assert 'hf' in plugins.names('tasks'); "
        "loaded = [m for m in sys.modules if m.startswith('timeprest.profiles.zoo.')]; "
        "assert not loaded, loaded; assert 'transformers' not in sys.modules; "
        "plugins.load('tasks', 'vgg16')('vgg16', None)\n"
        "assert 'timeprest.profiles.zoo.bert' not in sys.modules; "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers_are_leaves_of_torch():
    """A layer of our own class would be taken apart by tracing, and lose its name."""
    for name in SMALL:
        model = on_meta(name, SMALL[name])
        for path, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            assert not own or type(module).__module__.startswith("torch.nn"), path
    assert isinstance(on_meta("mlp").fc1, nn.Linear)


@pytest.mark.parametrize("name", ["gpt2", "bert-base"])
def test_a_head_may_have_weights_of_its_own(name):
    """Then it needn't share the embedding's stage: one more matrix, and nothing is tied."""
    shape = "layers=1,width=8,heads=2,vocabulary=20,context=8,length=8"
    counts = []
    for tied in (1, 0):
        task = built_in(name, f"{shape},tied={tied}")
        model = task.model()
        counts.append(sum(p.numel() for p in model.parameters()))
        inputs, target = default_collate([task.data("train")[k] for k in range(2)])
        inputs = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        task.loss(model(*inputs), target).backward()
    assert counts[1] - counts[0] == 20 * 8


def test_the_digits_are_scikit_learns_in_its_split():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from timeprest.profiles.zoo import digits

    theirs = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        theirs.images, theirs.target, test_size=0.2, random_state=0, stratify=theirs.target
    )
    for split, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        images, labels = digits.Digits().data(split).tensors
        assert labels.tolist() == y.tolist()
        pixels = torch.tensor(x, dtype=torch.float32).unsqueeze(1)
        assert torch.equal(images, (pixels / 16.0 - digits.MEAN) / digits.DEVIATION)


def test_the_digits_take_no_other_library():
    code = (
        "import sys; from timeprest.profiles.zoo.digits import Digits; Digits().data('test'); "
        "print(sorted({'sklearn', 'scipy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
