"""Which layers a stage computes again before its backward, and what it keeps then.

A stage may keep nothing but what it receives, and run its whole forward again (Chen et al., 2016,
arXiv:1604.06174). Or it computes some of its layers again alone: those that are soon done and
whose outputs are large, as Korthikanti et al. (2022, arXiv:2205.05198) do with the core of
attention. What these layers made isn't kept then, by whomever it is needed; what they are made from
is. Before the backward they run once, one after another.

Layers are chosen by how many bytes fewer a micro-batch in flight keeps for each second of their
forwards, one after another (`selections`): which set is the best for a model is a minimum cut for
each number of bytes, which the steps come close to.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, cached_property, lru_cache
from itertools import combinations
from typing import NamedTuple

from ...profiles.profile import Profile

Recompute = bool | tuple[str, ...]
"""Of a stage: whether its forward is run again; or the names of the layers that are."""

Selection = bool | frozenset[str]
"""Of any stage: those of these layers that it has; or all, or none."""

MOST_SELECTIONS = 3
"""Sets of layers that a search tries, besides none and all."""


def of_stage(chosen: Selection, nodes: Sequence[str]) -> Recompute:
    """Those of the recomputed layers that are on a stage of these layers."""
    if isinstance(chosen, bool):
        return chosen
    found = tuple(name for name in nodes if name in chosen)
    return found or False


def selection_of(
    recompute: Recompute, nodes: Sequence[str], choices: Sequence[Selection]
) -> Selection:
    """Which of these sets of recomputed layers a stage of these layers has: the first that leaves
    it its own, or else holds them; where none does, its own."""
    for chosen in choices:
        if of_stage(chosen, nodes) == recompute:
            return chosen
    if isinstance(recompute, bool):
        return recompute
    names = frozenset(recompute)
    wider = (each for each in choices if not isinstance(each, bool) and names <= each)
    return next(wider, names)


class KeptStorages:
    """How many times a stage keeps each storage per micro-batch, given the layers that it
    recomputes.

    Attributes:
        profile: whose layers they are.
        maker: storage → position of the layer that makes it; none for the model's inputs.
        savers: storage → positions of the layers whose backward needs it.
        uses: storage → (producer, consumer) by position, of each edge it goes along.
        rewriters: storage → positions of the layers that change it in place: those that say so, and
            for profiles that don't, those that hand it on and are no `views`.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._position = {layer.name: k for k, layer in enumerate(profile.layers)}
        given = {found.name for found in profile.inputs}
        self.maker: dict[str, int] = {}
        self.savers: dict[str, list[int]] = {}
        self.uses: dict[str, list[tuple[int, int]]] = {}
        for edge in profile.edges:
            made = self._position[edge.producer]
            if edge.storage not in given:
                self.maker[edge.storage] = min(made, self.maker.get(edge.storage, made))
            if edge.consumer in self._position:
                ends = made, self._position[edge.consumer]
                self.uses.setdefault(edge.storage, []).append(ends)
        for k, layer in enumerate(profile.layers):
            for name in layer.saves:
                self.savers.setdefault(name, []).append(k)
        handed_on: dict[str, set[int]] = {}
        for edge in profile.edges:
            if self.maker.get(edge.storage) != self._position[edge.producer]:
                handed_on.setdefault(edge.storage, set()).add(self._position[edge.producer])
        for k, layer in enumerate(profile.layers):
            for name in self.maker.keys() & set(layer.changes or ()):
                handed_on.setdefault(name, set()).add(k)
        self.rewriters = {
            name: found
            for name, layers in handed_on.items()
            if (found := sorted(k for k in layers if k not in self.views))
        }

    def positions(self, names: Collection[str]) -> frozenset[int]:
        """Of layers by name."""
        return frozenset(self._position[name] for name in names)

    @cached_property
    def of_layer(self) -> list[list[str]]:
        """Per layer, the storages that it makes, takes or saves, in order."""
        found: list[dict[str, None]] = [{} for _ in self.profile.layers]
        for name, ends in self.uses.items():
            for k in {k for pair in ends for k in pair}:
                found[k][name] = None
        for table in (self.savers, {name: [k] for name, k in self.maker.items()}):
            for name, layers in table.items():
                for k in layers:
                    found[k][name] = None
        return [list(names) for names in found]

    @cached_property
    def near(self) -> list[set[int]]:
        """Per layer, the others that make, take or save one of its storages."""
        users: dict[str, set[int]] = {}
        for k, names in enumerate(self.of_layer):
            for name in names:
                users.setdefault(name, set()).add(k)
        return [
            set().union(*(users[name] for name in names)) - {k}
            for k, names in enumerate(self.of_layer)
        ]

    def is_recomputed(self, name: str, recomputed: AbstractSet[int]) -> bool:
        """Whether a storage is made anew before the backward, where these are computed again."""
        if self.maker.get(name, -1) not in recomputed or self._fed(name, recomputed):
            return False
        # What is changed later on isn't what they make.
        return all(k in recomputed for k in self.rewriters.get(name, ()))

    def keepers(self, name: str, recomputed: AbstractSet[int]) -> list[int]:
        """Layers any of which has its stage keep a storage for each micro-batch in flight.

        Args:
            recomputed: positions of the layers computed again, of the stage or of the model.
        """
        # The model's inputs are there anyway.
        if name not in self.maker:
            return [k for k in self.savers.get(name, ()) if k not in recomputed]
        if self.is_recomputed(name, recomputed):
            return []
        return self._fed(name, recomputed) or self.savers.get(name, [])

    def copiers(self, name: str, recomputed: AbstractSet[int]) -> list[int]:
        """Layers any of which has its stage keep a copy besides: it is computed again from what it
        changes in place, and that isn't."""
        if self.maker.get(name, -1) in recomputed:
            return []
        return [k for k in self.rewriters.get(name, ()) if k in recomputed]

    def kept(
        self, name: str, recomputed: AbstractSet[int], inside: AbstractSet[int] | None = None
    ) -> int:
        """How many times a stage keeps a storage for each micro-batch in flight.

        Args:
            recomputed: positions of the layers of the stage that are computed again.
            inside: of all its layers; None: of the whole model.
        """
        both = self.keepers(name, recomputed), self.copiers(name, recomputed)
        return sum(any(inside is None or k in inside for k in layers) for layers in both)

    def _fed(self, name: str, recomputed: AbstractSet[int]) -> list[int]:
        """Layers computed again that take it from one that isn't."""
        return [
            k for made, k in self.uses.get(name, ()) if k in recomputed and made not in recomputed
        ]

    # Choosing layers ---------------------------------------------------------------------------

    @cached_property
    def views(self) -> dict[int, list[int]]:
        """Layers that make no memory of their own, change and save nothing → the layer that they
        take from."""
        makers = set(self.maker.values())
        layers = self.profile.layers
        takes: dict[int, set[int]] = {}
        for edge in self.profile.edges:
            if edge.consumer in self._position:
                k = self._position[edge.consumer]
                takes.setdefault(k, set()).add(self._position[edge.producer])
        return {
            k: sorted(sources)
            for k, sources in takes.items()
            if k not in makers
            and len(sources) == 1
            and not layers[k].saves
            and not layers[k].changes
            and not any(m.saved_bytes for m in layers[k].measurements)
        }

    @cached_property
    def viewed_by(self) -> dict[int, list[int]]:
        """Layer → the views that take from it."""
        found: dict[int, list[int]] = {}
        for view, sources in self.views.items():
            for k in sources:
                found.setdefault(k, []).append(view)
        return found

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """Layers that make a storage or change it in place, where any do → all of these, and those
        that share another such storage with them. Some of them alone would run again on what
        others have changed."""
        import networkx as nx

        graph = nx.Graph()
        for name, layers in self.rewriters.items():
            nx.add_path(graph, [*layers, *([self.maker[name]] if name in self.maker else [])])
        return {k: sorted(found) for found in nx.connected_components(graph) for k in found}

    def along_with(self, recomputed: AbstractSet[int], k: int) -> list[int]:
        """A layer to be computed again, with those of its group, and the views that then are, too:
        of nothing else."""
        added = self.groups.get(k, [k])[:]
        front = added[:]
        while front:
            for view in self.viewed_by.get(front.pop(), ()):
                known = recomputed | set(added)
                if view not in known and all(source in known for source in self.views[view]):
                    added.append(view)
                    front.append(view)
        return added


def selections(
    profile: Profile, micro_batch: int, at_once: float = 0.0
) -> tuple[frozenset[str], ...]:
    """Nested sets of layers to recompute, greedily by bytes freed for each second of forward, cut
    at the corners of that curve; the cheapest first.

    Args:
        micro_batch: samples, one of the sizes that the profile measured.
        at_once: of the micro-batches in flight, how many have their layers computed again at once.

    Returns:
        At most `MOST_SELECTIONS`; none where nothing is worth it.
    """
    steps = _steps(profile, micro_batch, at_once)
    if not steps:
        return ()
    time_s, nbytes = [0.0], [0.0]
    for _, step_s, freed in steps:
        time_s.append(time_s[-1] + step_s)
        nbytes.append(nbytes[-1] - freed)
    forward_s = sum(_forward_s(profile, k, micro_batch) for k in range(len(profile.layers)))
    # The last point is that of whole forwards, after which next to nothing is kept.
    time_s.append(max(forward_s, time_s[-1]))
    kept, sizes = KeptStorages(profile), _sizes(profile, micro_batch)
    shared = sum(sizes[name] for name in kept.savers if kept.kept(name, frozenset()))
    nbytes.append(-float(shared + sum(_private_bytes(kept, micro_batch))) * (1 - at_once))
    found = []
    for k in sorted(_corners(time_s, nbytes, MOST_SELECTIONS)):
        layers = (profile.layers[j].name for added, _, _ in steps[:k] for j in added)
        found.append(frozenset(layers))
    return tuple(found)


def in_steps(
    profile: Profile, micro_batch: int, at_once: float = 0.0
) -> tuple[frozenset[str], ...]:
    """Layers in the sequence in which `selections` adds them to its sets."""
    steps = _steps(profile, micro_batch, at_once)
    return tuple(frozenset(profile.layers[j].name for j in added) for added, _, _ in steps)


def fewest(
    steps: Sequence[frozenset[str]],
    known: int,
    fits: Callable[[frozenset[str]], bool],
    seconds: Callable[[frozenset[str]], float],
) -> frozenset[str] | None:
    """Few of a stage's layers, in the least seconds of forwards, whose recomputation makes it fit,
    by bisection and exchanges of the last ones; None: not even all of them do.

    Args:
        steps: those to choose from, in the sequence of `in_steps`.
        known: so many of them do; more than there are: it isn't known.
        fits: whether a stage that computes these again fits.
        seconds: of their forwards.
    """

    def of(parts: Sequence[frozenset[str]]) -> frozenset[str]:
        return frozenset[str]().union(*parts)

    if known > len(steps) and not fits(of(steps)):
        return None
    low, high = 0, min(known, len(steps))
    while low < high:
        middle = (low + high) // 2
        if fits(of(steps[:middle])):
            high = middle
        else:
            low = middle + 1
    chosen = [*steps[:high]]
    least_s = seconds(of(chosen))
    # The last ones by others that come later, as their rates may be much the same.
    others = {
        of([*steps[:count], *added]): [*steps[:count], *added]
        for count in range(high - 1, max(high - 1 - _MOST_REPLACED, -1), -1)
        for k in (1, 2, 3)
        for added in combinations(steps[count : count + _MOST_LATER], k)
    }
    for recomputed in sorted(others, key=seconds):
        if seconds(recomputed) >= least_s:
            break
        if fits(recomputed):
            chosen = others[recomputed]
            break
    # The last of them may free more than is asked for: then some before it needn't be there.
    for step in reversed(chosen[-_MOST_LEFT_OUT:]):
        fewer = [each for each in chosen if each is not step]
        if fits(of(fewer)):
            chosen = fewer
    return of(chosen)


_MOST_LEFT_OUT = 64
"""Steps tried without, of a stage."""

_MOST_REPLACED, _MOST_LATER = 3, 6
"""The last steps that are replaced by at most three of so many from there on."""


class _Gain(NamedTuple):
    """What computing some layers again frees for a micro-batch in flight, less what is made anew at
    once.

    Attributes:
        rate: bytes for each second of their forwards.
        seconds: of these.
        freed: bytes.
    """

    rate: float
    seconds: float
    freed: float
    layers: list[int]


class _Gains:
    """What computing more layers again frees, beside those that are already."""

    def __init__(self, kept: KeptStorages, micro_batch: int, at_once: float) -> None:
        layers = kept.profile.layers
        self._kept, self._at_once, self.recomputed = kept, at_once, set[int]()
        self._sizes = _sizes(kept.profile, micro_batch)
        self._private = _private_bytes(kept, micro_batch)
        self._forward_s = [_forward_s(kept.profile, k, micro_batch) for k in range(len(layers))]
        self._least_s = 1e-9 * sum(self._forward_s) or 1.0
        self._before = cache(lambda name: kept.kept(name, self.recomputed))

    def recompute(self, added: list[int]) -> None:
        """Compute these layers again, from now on."""
        self.recomputed.update(added)
        self._before.cache_clear()

    def of(self, k: int) -> _Gain:
        """Of layer k: alone, or with those that make what would have to be kept for it, such as
        both of a sum's."""
        kept = self._kept
        added = kept.along_with(self.recomputed, k)
        alone, fed = self._of_layers(added)
        for maker in dict.fromkeys(kept.maker[name] for name in fed):
            if maker not in added:
                added = [*added, *kept.along_with(self.recomputed | set(added), maker)]
        return max(alone, self._of_layers(added)[0], key=lambda found: found.rate) if fed else alone

    def _of_layers(self, added: list[int]) -> tuple[_Gain, list[str]]:
        """Of these layers, and the storages that are kept for them and weren't."""
        kept, recomputed, at_once = self._kept, self.recomputed, self._at_once
        after, fed = recomputed | set(added), []
        freed = sum(self._private[j] for j in added) * (1 - at_once)
        for name in sorted({name for j in added for name in kept.of_layer[j]}):
            before, then = self._before(name), kept.kept(name, after)
            freed += self._sizes[name] * (before - then)
            if at_once and name in kept.savers and kept.is_recomputed(name, after):
                freed -= self._sizes[name] * at_once * (not kept.is_recomputed(name, recomputed))
            if then > before == 0 and kept.maker.get(name) not in {None, *after}:
                fed.append(name)
        seconds = sum(self._forward_s[j] for j in added)
        return _Gain(freed / max(seconds, self._least_s), seconds, freed, added), fed

    def turn(self, k: int) -> tuple[float, float, int]:
        """Where its turn is; of layers with the same rate, layers that are alike one after another:
        then each stage has its share of them."""
        found = self.of(k)
        return -float(f"{found.rate:.9g}"), -found.freed, k


@lru_cache(maxsize=4)
def _steps(
    profile: Profile, micro_batch: int, at_once: float
) -> tuple[tuple[list[int], float, float], ...]:
    """Layers to compute again, with the seconds of their forwards and the bytes that are freed for
    a micro-batch in flight, less those made anew at once; the most bytes for each second first.
    Searches of one profile ask again, and of hundreds of layers it takes seconds."""
    return tuple(_each_step(KeptStorages(profile), micro_batch, at_once))


def _each_step(
    kept: KeptStorages, micro_batch: int, at_once: float
) -> Iterator[tuple[list[int], float, float]]:
    gains, near = _Gains(kept, micro_batch, at_once), kept.near
    recomputed = gains.recomputed
    known = [gains.turn(k) for k in range(len(near))]
    waiting = [each for k, each in enumerate(known) if k not in kept.views]
    heapq.heapify(waiting)
    while waiting:
        found = heapq.heappop(waiting)
        k = found[-1]
        if k in recomputed or found != known[k]:
            continue
        if found[0] >= 0:
            return
        _, step_s, freed, added = gains.of(k)
        gains.recompute(added)
        yield added, step_s, freed
        touched = set().union(*(near[j] for j in added))
        # What makes a neighbour's storages counts there, too.
        touched = touched.union(*(near[j] for j in touched))
        for j in touched.union(*(kept.groups.get(j, ()) for j in touched)) - recomputed:
            new = gains.turn(j)
            if j not in kept.views and new != known[j]:
                known[j] = new
                heapq.heappush(waiting, new)


def _corners(time_s: Sequence[float], nbytes: Sequence[float], most: int) -> set[int]:
    """The points between the first and the last that a falling curve turns at most; so many."""
    whole_s = (time_s[-1] - time_s[0]) or 1.0
    whole = (nbytes[0] - nbytes[-1]) or 1.0
    ends, found = [(0, len(time_s) - 1)], set[int]()
    while len(found) < most:
        best, at = 0.0, None
        for span in ends:
            a, b = span
            for k in range(a + 1, b):
                share = (time_s[k] - time_s[a]) / ((time_s[b] - time_s[a]) or whole_s)
                below = nbytes[a] + share * (nbytes[b] - nbytes[a]) - nbytes[k]
                if below / whole > max(best, _WORTH_IT):
                    best, at = below / whole, (span, k)
        if at is None:
            break
        (a, b), k = at
        found.add(k)
        ends.remove((a, b))
        ends += [(a, k), (k, b)]
    return found


_WORTH_IT = 0.01
"""Of all bytes, what a set must free besides what a mixture of its neighbours does."""


def _private_bytes(kept: KeptStorages, micro_batch: int) -> list[float]:
    """Per layer, what it keeps besides the storages that others may keep too."""
    sizes = _sizes(kept.profile, micro_batch)
    found = []
    for layer in kept.profile.layers:
        (measured,) = (m for m in layer.measurements if m.micro_batch == micro_batch)
        found.append(max(measured.saved_bytes - sum(sizes[name] for name in layer.saves), 0.0))
    return found


def _sizes(profile: Profile, micro_batch: int) -> dict[str, float]:
    """Bytes of each storage that several layers may keep."""
    return {s.name: s.fixed_bytes + s.bytes_per_sample * micro_batch for s in profile.storages}


def _forward_s(profile: Profile, k: int, micro_batch: int) -> float:
    return next(m.forward_s for m in profile.layers[k].measurements if m.micro_batch == micro_batch)
