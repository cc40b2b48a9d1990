"""All-reduce over workers: whatever the tensors, and gradients that some or all of them lack."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timeprest.profiles.errors import RunError
from timeprest.runtime.communication import all_reduce as sums_module
from timeprest.runtime.communication.all_reduce import (
    BUCKET_BYTES,
    GradientAllReduce,
    LocalAllReduce,
    Pool,
    ProcessAllReduce,
    rank_groups,
    reduce_groups,
    stage_group,
)
from timeprest.runtime.communication.channel import PeerError
from timeprest.runtime.prepare.workers import Replica
from torch import nn

PAIR = {"pair": ((0,), (1,))}
RANKS = {"pair": (0, 1)}


def both():
    pool = Pool(PAIR)
    return [LocalAllReduce(rank, pool) for rank in (0, 1)]


def test_groups_of_stages_and_of_all():
    replicas = [Replica(0, 0, 0, 0, 2), Replica(1, 0, 1, 1, 2), Replica(2, 1, 2)]
    groups = reduce_groups(replicas)
    assert groups == {"all stages": ((0,), (1,), (2,)), stage_group(0): ((0,), (1,))}
    assert rank_groups(replicas, groups) == {"all stages": (0, 1, 2), stage_group(0): (0, 1)}
    assert reduce_groups([Replica(0, 0, 0)]) == {}


def test_groups_where_a_worker_has_several_stages():
    """Stages 0 and 2 on one device, twice; stage 1 on another one."""
    replicas = [Replica(0, 0, 0, 0, 2), Replica(1, 0, 1, 1, 2), Replica(2, 1, 2)]
    replicas += [Replica(3, 2, 0, 0, 2), Replica(4, 2, 1, 1, 2)]
    groups = reduce_groups(replicas)
    assert groups["all stages"] == ((0, 3), (1, 4), (2,))
    assert groups[stage_group(2)] == ((3,), (4,))
    assert rank_groups(replicas, groups)[stage_group(2)] == (0, 1)
    alone = [Replica(0, 0, 0), Replica(1, 1, 0)]
    assert reduce_groups(alone) == {"all stages": ((0, 1),)}
    assert rank_groups(alone, reduce_groups(alone)) == {}


def test_a_sum_within_one_process_is_made_when_all_have_come():
    first, second = both()
    mine, other = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    begun = first.start("pair", [mine])
    with pytest.raises(PeerError, match="waits for number 1"):
        begun.wait()
    second.start("pair", [other]).wait()
    begun.wait()
    assert mine.tolist() == other.tolist() == [11.0, 22.0]
    # The next one is another sum; and a group of one is none.
    again = [sums.start("pair", [torch.ones(1)]) for sums in (first, second)]
    for pending in again:
        pending.wait()
    first.start("nobody else", [mine]).wait()
    assert mine.tolist() == [11.0, 22.0]


def gradients(*values, dtypes=(torch.float32,) * 3):
    """Parameters with these gradients."""
    found = []
    for value, dtype in zip(values, dtypes, strict=True):
        found.append(nn.Parameter(torch.zeros(2, dtype=dtype)))
        found[-1].grad = None if value is None else torch.full((2,), float(value), dtype=dtype)
    return found


def test_gradients_that_some_or_all_replicas_lack():
    """None on all stays None: an optimizer leaves such a parameter alone, decay and all."""
    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    replicas = gradients(1, 2, None, dtypes=dtypes), gradients(3, None, None, dtypes=dtypes)
    others = [torch.tensor([0.5]), torch.tensor([0.25])]
    under_way = [
        GradientAllReduce(sums, "pair", parameters, [other])
        for sums, parameters, other in zip(both(), replicas, others, strict=True)
    ]
    for summing in under_way:
        summing.wait()
    for parameters in replicas:
        assert [p.grad is None for p in parameters] == [False, False, True]
        assert [p.grad.dtype for p in parameters[:2]] == list(dtypes[:2])
        assert parameters[0].grad.tolist() == [4.0, 4.0]
        assert parameters[1].grad.tolist() == [2.0, 2.0]
    assert [other.item() for other in others] == [0.75, 0.75]


def test_sparse_gradients_are_refused():
    layer = nn.Embedding(3, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RunError, match="sparse=False"):
        GradientAllReduce(both()[0], "pair", list(layer.parameters()))


class Work:
    def wait(self, timeout):
        return True


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64, torch.int32, torch.complex64]),
            st.sampled_from([0, 1, 5, 300, 70_000, BUCKET_BYTES // 4, BUCKET_BYTES]),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_every_tensor_is_summed_once_in_few_messages(drawn):
    """Between processes: the transport is one that sums two equal workers' tensors."""
    tensors = []
    for k, (dtype, count, turned) in enumerate(drawn):
        tensor = torch.full((2, count), k + 1, dtype=dtype).conj()
        tensors.append(tensor.t() if turned else tensor)
    messages = []

    def all_reduce(tensor, group, async_op):
        assert tensor.is_contiguous()
        assert not tensor.is_conj()
        messages.append(tensor.nbytes)
        tensor.mul_(2)
        return Work()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sums_module.dist, "all_reduce", all_reduce)
        sums = ProcessAllReduce(RANKS, ["stage 0, replica 0", "stage 0, replica 1"], 0, 1.0)
        sums.start("pair", tensors).wait()
    for k, tensor in enumerate(tensors):
        assert bool((tensor == 2 * (k + 1)).all())
    assert sum(messages) == sum(t.nbytes for t in tensors)
    small = sum(t.nbytes for t in tensors if t.nbytes < BUCKET_BYTES)
    large = sum(t.nbytes >= BUCKET_BYTES for t in tensors)
    assert len(messages) <= large + 4 + 2 * small / BUCKET_BYTES
