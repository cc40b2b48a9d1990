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


def list_schedule_of_replicas(pipeline, mini_batches):
    """The same of a chain of stages whose replicas have paces of their own, without transfer times.

    Micro-batch i is replica i mod r's. A backward can start when its last share can, and each share
    starts by itself; then all replicas update together, or where no update follows, each goes on.
    """
    most = mini_batches + 2 * max(pipeline.limits)
    n, stages = pipeline.micro_batches, range(pipeline.stages)
    paces = pipeline.paces
    free = [[0.0] * len(mine) for mine in paces]
    ended_f, ended_b = {}, {}
    orders = [[] for _ in stages]

    def taken(s, j):
        return [i for i in range(n) if i % len(paces[s]) == j]

    def ready_f(s, b, i):
        return ended_f.get((s - 1, b, i)) if s else 0.0

    def ready_b(s, b, j):
        if s == stages[-1]:
            return 0.0
        of = {(s + 1, b, i % len(paces[s + 1])) for i in taken(s, j)}
        return max(ended_b[key] for key in of) if of <= ended_b.keys() else None

    def options(s):
        done = sum(op.kind == "B" for op in orders[s])
        begun = sum(op.kind == "F" for op in orders[s])
        b, i = divmod(begun, n)
        if b < most and (i or b - done < pipeline.limits[s]) and ready_f(s, b, i) is not None:
            yield max(ready_f(s, b, i), free[s][i % len(free[s])]), 1, s, Op("F", b, i)
        shares = [ready_b(s, done, j) for j in range(len(free[s]))]
        if begun >= n * (done + 1) and None not in shares:
            yield max(*shares, *free[s]), 0, s, Op("B", done)

    while any(Op("B", mini_batches - 1) not in ops for ops in orders):
        _, _, s, op = min((option for s in stages for option in options(s)), key=lambda o: o[:3])
        orders[s].append(op)
        b, i = op.mini_batch, op.micro_batch
        if op.kind == "F":
            j = i % len(free[s])
            free[s][j] = max(ready_f(s, b, i), free[s][j]) + pipeline.forward_s[s] * paces[s][j]
            ended_f[s, b, i] = free[s][j]
            continue
        for j in range(len(free[s])):
            takes_s = pipeline.backward_s[s] * paces[s][j] * len(taken(s, j))
            free[s][j] = max(ready_b(s, b, j), free[s][j]) + takes_s
            ended_b[s, b, j] = free[s][j]
        if pipeline.updates_after(b):
            free[s] = [max(free[s]) + pipeline.update_s[s]] * len(free[s])
        if pipeline.updates_after(b) or b == mini_batches - 1:
            orders[s].append(Op("U", b))
    return Schedule(
        tuple(tuple(op for op in ops if op.mini_batch < mini_batches) for ops in orders)
    )
