"""The list schedule of nF1B as its rule says it, without any cleverness: what orders must equal."""

from __future__ import annotations

from timeprest.planner.systems.operations import Op, Schedule


def list_schedule(pipeline, mini_batches):
    """At every step the operation that can start earliest; ties to backwards, then lower stages.

    For stages without replicas, links with wires of their own, and an update right after its
    backward. Where devices have several stages, ties go to the stage nearer to the output.
    The pipeline goes on as if more mini-batches came, and these are left out.
    """
    most = mini_batches + 2 * max(pipeline.limits)
    n, stages = pipeline.micro_batches, range(pipeline.stages)
    device = pipeline.placement or tuple(stages)
    free = [0.0 for _ in stages]
    wire_free = {}
    arrivals = {}
    orders = [[] for _ in stages]
    turns = [[] for _ in range(max(device) + 1)]

    def send(source, target, op, now, wire_s, latency_s):
        begin = max(now, wire_free.get((source, target), 0.0))
        wire_free[source, target] = begin + wire_s
        arrivals.setdefault((target, op), []).append(begin + wire_s + latency_s)

    def ready(s, op, due):
        came = arrivals.get((s, op), [])
        return max([0.0, *came]) if len(came) == due else None

    def options(s):
        done = [op for op in orders[s] if op.kind == "B"]
        begun = [op for op in orders[s] if op.kind == "F"]
        b, i = divmod(len(begun), n)
        if b < most and (i or b - len(done) < pipeline.limits[s]):
            yield 1, Op("F", b, i), sum(1 for link in pipeline.links if link.target == s)
        if len(begun) >= n * (len(done) + 1):
            due = sum(1 for link in pipeline.links if link.source == s and link.has_gradient)
            yield 0, Op("B", len(done)), due

    while any(Op("U", mini_batches - 1) not in ops for ops in orders):
        found = [
            (max(free[device[s]], when), rank, -s if pipeline.placement else s, s, op)
            for s in stages
            for rank, op, due in options(s)
            if (when := ready(s, op, due)) is not None
        ]
        start, _, _, s, op = min(found, key=lambda option: option[:3])
        orders[s].append(op)
        d = device[s]
        turns[d].append((s, op))
        if op.kind == "F":
            free[d] = start + pipeline.forward_s[s]
            for link in pipeline.links:
                if link.source == s:
                    send(s, link.target, op, free[d], link.forward_s, link.latency_s)
        else:
            end = start + pipeline.backward_s[s] * n
            for link in pipeline.links:
                if link.target == s and link.has_gradient:
                    send(s, link.source, op, end, link.backward_s * n, link.latency_s)
            update = Op("U", op.mini_batch)
            orders[s].append(update)
            turns[d].append((s, update))
            free[d] = end + pipeline.update_s[s]
    found = tuple(tuple(op for op in ops if op.mini_batch < mini_batches) for ops in orders)
    placed = [tuple(s for s, op in mine if op.mini_batch < mini_batches) for mine in turns]
    return Schedule(found, tuple(placed) if pipeline.placement else ())
