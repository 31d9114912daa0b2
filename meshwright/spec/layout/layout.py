"""`Layout`: the coordinates and groups of every rank of a mesh, as a pure value.

A world of ranks is seen in two ways. The *dense* view is tp x cp x dp x pp. The *expert* view, which
mixture-of-experts layers use, is etp x ep x edp x pp over the same ranks, where etp, ep and edp together cover
tp x cp x dp. Both follow one order string, fastest-varying axis first. In the expert view, etp takes the position of
tp in that string, and edp that of dp. With `replicas` > 1 the world is divided into that many equal runs of
neighbouring ranks, each of which has all these axes. Everything is computed from strides, so that a query costs no more
than the size of the group that it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt, prod
from typing import NamedTuple

from meshwright.errors import UserError, divisors, either, nearest
from meshwright.spec.layout.params import EP_ACROSS, EP_NODE, REPLICA, SHARD

AXES = ("tp", "cp", "ep", "dp", "pp")
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
ONLY_EXPERTS, ONLY_DENSE = ("ep", "edp", "etp"), ("dp", "cp")  # the axes that only one of the views has
CUT_EXPERTS = ("ep", "etp")  # the axes that divide experts and their weights
WORLD = "world"
EXPERT_WORDS = {"tp": "etp", "dp": "edp"}  # the expert view's axes, by the dense axis whose position they take
# The most ranks of a layout. Layouts list ranks one by one, so a mistyped size would exhaust memory.
LARGEST_WORLD = 2**20
SPECIAL_GROUPS = ("embedding", "position_embedding", WORLD)

GROUP_KINDS = (
    *("tp", "cp", "ep", "dp", "pp", "dp-cp", "tp-cp", "tp-dp", "tp-dp-cp", "tp-pp"),
    *("tp-ep", "tp-ep-pp", "edp", "embedding", "position_embedding"),
)
"""The kinds of groups that a training job makes, in the order in which `meshwright layout` prints them."""

STEP_GROUPS = ("tp", "dp", "dp-cp", "pp", "embedding", "world")
"""The groups that every training step may communicate over. `Layout.step_groups` adds those of cp, ep, edp, parts of
axes and replicas where a layout has them."""

REPLICAS, INNER = "replicas", "tp-cp-dp-pp"  # ranks with the same coordinate in every replica; the ranks of one replica

Parts = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


def whole_axis(axis: str) -> str:
    """Return the axis that a part such as `tp.q` belongs to, or the axis itself."""
    return axis.partition(".")[0]


class Atom(NamedTuple):
    """An axis without parts, or one part of an axis: `size` steps of `stride` ranks each."""

    name: str
    axis: str
    size: int
    stride: int

    def at(self, rank: int) -> int:
        return rank // self.stride % self.size


class AxisProduct(NamedTuple):
    """The groups of a product of axes.

    `inside` are the atoms that vary within a group, and `between` the ones that tell groups apart. `offsets` are a
    group's ranks relative to its first rank.
    """

    inside: tuple[Atom, ...]
    between: tuple[Atom, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The coordinates and groups of every rank.

    `order` names the axes, fastest-varying first. `parts` makes an axis a product of named parts, fastest
    first: `(("tp", (("tp.kv", 2), ("tp.q", 2))),)` is tp=4 as a 2 x 2 grid, and the name of a part can be used
    wherever the name of an axis can. `node_size` is the number of neighbouring ranks that share a machine. `ends` are
    the pipeline ranks that hold the model's first and its last stage. If it is None, these are the first and the last
    pipeline rank. `shared` names sets of pipeline ranks that hold the same parameters, as an encoder-decoder's stacks
    do. A set named "embedding" replaces the ends.
    """

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    order: str = "tp-cp-ep-dp-pp"
    node_size: int | None = None
    parts: Parts = ()
    ends: tuple[int, int] | None = None
    etp: int = 0  # tensor parallelism inside an expert; 0: the same as tp
    shared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    replicas: int = 1  # parts of the world that train independently; the slowest axis of both views

    def __post_init__(self) -> None:
        object.__setattr__(self, "etp", self.etp or self.tp)
        _check_sizes(self)
        _check_order(self)
        _check_parts(self)

    @property
    def dp(self) -> int:
        """The number of data-parallel ranks of the dense view."""
        return self.world // (self.tp * self.cp * self.pp * self.replicas)

    @property
    def edp(self) -> int:
        """The number of data-parallel replicas of an expert: tp x cp x dp / (etp x ep)."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def cuts_dp(self) -> bool:
        """True if dp is a product of parts: states are sharded inside nodes, or weights are copied there."""
        return "dp" in dict(self.parts)

    @property
    def first_and_last(self) -> tuple[int, int]:
        """The pipeline ranks that hold the model's first and its last stage."""
        return (0, self.pp - 1) if self.ends is None else self.ends

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """The pipeline ranks that hold the same parameters, by the name of their group."""
        first, last = self.first_and_last
        return {"embedding": (first, last), "position_embedding": (first,), **dict(self.shared)}

    @property
    def views_agree(self) -> bool:
        """True if the dense and the expert view give every rank the same pipeline stage and, where etp equals tp, the
        same tensor-parallel coordinate.

        They differ where the order puts axes before pp or tp whose sizes differ between the two views. An expert would
        then be on another pipeline stage than its block.
        """
        dense, expert = _strides(self, DENSE_AXES), _strides(self, EXPERT_AXES)
        same_tp = self.etp != self.tp or self.tp == 1 or dense["tp"] == expert["etp"]
        return same_tp and (self.pp == 1 or dense["pp"] == expert["pp"])

    def axis_size(self, axis: str) -> int:
        """Return the size of one of tp, cp, ep, dp, pp, etp, edp, replicas."""
        return int(getattr(self, axis))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of an axis, a part, a product of them ("tp-pp", words in any order), or a special name.

        Ranks in a group ascend and groups ascend by their first rank. Names with ep, etp or edp belong to
        the expert view, in which "tp" means etp. All other names belong to the dense view.
        """
        if name == WORLD:
            return (tuple(range(self.world)),)
        if name in self.holders:
            return tuple(_holders_of(self, name, stages) for stages in self.groups("pp"))
        product = _product(self, name)
        return tuple(tuple([first + step for step in product.offsets]) for first in _offsets(product.between))

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the group of `name` that contains `rank`, or () if the rank holds none of the group's parameters."""
        self._check_rank(rank)
        if name == WORLD:
            return tuple(range(self.world))
        if name in self.holders:
            holding = _holders_of(self, name, self.group("pp", rank))
            return holding if rank in holding else ()
        product = _product(self, name)
        # The first rank of a group has index 0 along every axis inside it.
        first = rank - sum(atom.at(rank) * atom.stride for atom in product.inside)
        return tuple([first + step for step in product.offsets])

    def size(self, name: str) -> int:
        """Return the number of ranks in a group of `name`."""
        if name == WORLD:
            return self.world
        if name in self.holders:
            return len(set(self.holders[name]))
        return len(_product(self, name).offsets)

    def canonical(self, name: str) -> str:
        """Return the canonical spelling of a product: words in the order of the order string, and an axis in place of
        all of its parts."""
        if self._is_special(name):
            return name
        inside = _product(self, name).inside
        words: dict[str, None] = {}
        for atom in inside:
            named = sum(other.axis == atom.axis for other in inside)
            # An axis without parts is one atom.
            whole = named == max(1, len(_parts_of(self, atom.axis)))
            words[atom.axis if whole else atom.name] = None
        return "-".join(words)

    def without_ones(self, name: str) -> str:
        """Return the name of the same groups without axes of one rank.

        dp-cp becomes dp where cp is 1. So does edp where, in addition, ep is 1 and etp equals tp. Groups with equal
        members then share one name, and so one communicator.
        """
        return name if self._is_special(name) else _without_ones(self, name)

    @property
    def group_kinds(self) -> tuple[str, ...]:
        """The kinds of groups that `meshwright layout` prints for this layout."""
        return (*GROUP_KINDS, *((REPLICAS,) if self.replicas > 1 else ()))

    def step_groups(self) -> list[str]:
        """Return the names of all groups that a training step may communicate over.

        The mesh creates exactly these, and the metrics of a step count the traffic of each.
        """
        names = [*STEP_GROUPS, *(name for _, pieces in self.parts for name, _ in pieces)]
        names += [name for name, _ in self.shared]
        # A router's losses are summed over tp-cp, whose ranks share sequences.
        names += ["cp", "tp-cp"] if self.cp > 1 else []
        names += [name for name in ("etp", "ep", "edp") if self.size(name) > 1]
        names += [f"{REPLICA}-cp"] if self.cp > 1 and REPLICA in names else []
        names += [REPLICAS, INNER] if self.replicas > 1 else []
        return sorted({self.without_ones(name) for name in names})

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` in the dense view: tp, cp, dp, pp, every part of these and, if there are
        several replicas, the index of its replica."""
        self._check_rank(rank)
        return _coordinate(self, DENSE_AXES, rank)

    def expert_coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` in the expert view: etp, ep, edp, pp, every part of these and, if there are
        several replicas, the index of its replica."""
        self._check_rank(rank)
        return _coordinate(self, EXPERT_AXES, rank)

    def rank_at(self, **coordinates: int) -> int:
        """Return the rank at these coordinates of one view: the inverse of `coordinate` and `expert_coordinate`.

        An axis that is not named counts as 0. Parts may be given instead of their axis. If both are given, the parts
        are ignored.
        """
        axes = _view_of(self, "-".join(coordinates), list(coordinates))
        # Strides of parts whose axis is not given itself. An ignored part has no stride, which counts as 0 below.
        parts = {atom.name: atom.stride for atom in _atoms(self, axes) if atom.axis not in coordinates}
        strides = parts | _strides(self, axes)
        for name, value in coordinates.items():
            if not 0 <= value < self.size(name):
                raise UserError(f"{name}={value} is outside this layout: choose 0 to {self.size(name) - 1}")
        return sum(value * strides.get(name, 0) for name, value in coordinates.items())

    def crosses_node(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are on more than one node; False if `node_size` is unknown."""
        if self.node_size is None or len(ranks) == 0:
            return False
        return min(ranks) // self.node_size != max(ranks) // self.node_size

    def _is_special(self, name: str) -> bool:
        return name in SPECIAL_GROUPS or name in self.holders

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise UserError(f"rank {rank} is not in a world of {self.world}: choose 0 to {self.world - 1}")


def check_world(world: int, what: str = "world", most: int = LARGEST_WORLD) -> None:
    """Raise if a world has more than `most` ranks. `what` names the setting in the error message."""
    if world > most:
        raise UserError(f"{what}={world} is more ranks than anybody has: use {most} at most")


def _check_sizes(layout: Layout) -> None:
    check_world(layout.world)
    for name in ("world", "tp", "cp", "pp", "ep", "etp", "replicas"):
        if layout.axis_size(name) < 1:
            raise UserError(f"{name}={layout.axis_size(name)} is not a size: choose {name}=1 or more")
    if layout.node_size is not None and layout.node_size < 1:
        raise UserError(f"node_size={layout.node_size} is not a size: choose the number of ranks on a node")

    world, tp, cp, pp = layout.world, layout.tp, layout.cp, layout.pp
    model = tp * cp * pp
    words = "tp*cp*pp"
    sizes = f"{tp}*{cp}*{pp}"
    if layout.replicas > 1:
        model = model * layout.replicas
        words = f"{words}*replicas"
        sizes = f"{sizes}*{layout.replicas}"
    if world % model:
        below = world // model * model
        worlds = either([below, below + model] if below else [model])
        raise UserError(
            f"world={world} is not divisible by {words}={sizes}={model}: "
            f"choose world={worlds}, or tp, cp and pp whose product divides {world}"
        )

    # The expert view divides the same ranks of a pipeline stage into etp x ep x edp.
    folded = tp * cp * layout.dp
    if folded % layout.etp:
        product = f"tp*cp*dp={tp}*{cp}*{layout.dp}={folded}"
        raise UserError(f"etp={layout.etp} does not divide {product}: choose etp={either(divisors(folded))}")
    shared = folded // layout.etp
    if shared % layout.ep:
        product = f"dp*cp={layout.dp}*{cp}={shared}"
        if layout.etp != tp:
            product = f"tp*cp*dp/etp={tp}*{cp}*{layout.dp}/{layout.etp}={shared}"
        spread = layout.etp > 1 and folded % layout.ep == 0
        other = ", or etp=1 (layout.etp=1), which spreads whole experts over the tp ranks too" if spread else ""
        raise UserError(f"ep={layout.ep} does not divide {product}: choose ep={either(divisors(shared))}{other}")


def _check_order(layout: Layout) -> None:
    words = layout.order.split("-")
    for word in words:
        if word not in AXES:
            raise UserError(
                f"order '{layout.order}' has the unknown axis '{word}'{nearest(word, AXES)}: "
                f"use {', '.join(AXES)}, fastest-varying first, joined by '-'"
            )
        if words.count(word) > 1:
            raise UserError(f"order '{layout.order}' names {word} {words.count(word)} times: name it once")
    # A size that the order leaves out must be 1. The order names etp and edp by their dense axes.
    for axis in (*AXES, *EXPERT_WORDS.values()):
        word = next((word for word, other in EXPERT_WORDS.items() if other == axis), axis)
        if word not in words and layout.axis_size(axis) > 1:
            raise UserError(
                f"order '{layout.order}' leaves out {word}, but {axis}={layout.axis_size(axis)}: "
                f"add it, as in '{layout.order}-{word}'"
            )


def _check_parts(layout: Layout) -> None:
    taken = {*AXES, *EXPERT_AXES, *SPECIAL_GROUPS, REPLICAS}
    split: set[str] = set()
    for axis, parts in layout.parts:
        if axis not in (*AXES, *EXPERT_AXES):
            raise UserError(
                f"parts of the unknown axis '{axis}'{nearest(axis, AXES)}: split one of {', '.join(AXES)}, etp or edp"
            )
        if axis in split:
            raise UserError(f"parts name {axis} twice: list all of its parts together")
        split.add(axis)
        for name, size in parts:
            if not name or "-" in name or name in taken:
                raise UserError(f"'{name}' can't name a part of {axis}: choose a new name without '-'")
            if size < 1:
                raise UserError(f"part {name}={size} of {axis} is not a size: choose 1 or more")
            taken.add(name)
        product = prod(size for _, size in parts)
        if product != layout.axis_size(axis) or not parts:
            shown = "*".join(name for name, _ in parts) or "of none"
            sizes = "*".join(str(size) for _, size in parts) or "1"
            raise UserError(
                f"parts {shown}={sizes}={product} do not make {axis}={layout.axis_size(axis)}: "
                f"choose parts whose product is {layout.axis_size(axis)}"
            )


def _parts_of(layout: Layout, axis: str) -> tuple[tuple[str, int], ...]:
    return next((parts for name, parts in layout.parts if name == axis), ())


@lru_cache(maxsize=256)
def _atoms(layout: Layout, axes: tuple[str, ...]) -> tuple[Atom, ...]:
    """Return the atoms of one view (`DENSE_AXES` or `EXPERT_AXES`) by ascending stride.

    Axes that the order string leaves out come last. They have size 1, as `_check_order` ensures.
    """
    words = layout.order.split("-")
    words += [axis for axis in AXES if axis not in words]
    if axes == EXPERT_AXES:
        words = [EXPERT_WORDS.get(word, word) for word in words]
    atoms: list[Atom] = []
    stride = 1
    for axis in words:
        if axis not in axes:
            continue
        for name, size in _parts_of(layout, axis) or ((axis, layout.axis_size(axis)),):
            atoms.append(Atom(name, axis, size, stride))
            stride *= size
    if layout.replicas > 1:
        atoms.append(Atom(REPLICAS, REPLICAS, layout.replicas, stride))
    assert stride * layout.replicas == layout.world
    return tuple(atoms)


@lru_cache(maxsize=20_000)
def _without_ones(layout: Layout, name: str) -> str:
    if layout.etp == layout.tp and layout.views_agree:
        # The experts' groups are then the dense ones: one communicator serves both.
        same = {"etp": "tp"} | ({"edp": "dp-cp"} if layout.ep == 1 else {})
        name = "-".join(same.get(word, word) for word in name.split("-"))
    words = [word for word in name.split("-") if layout.size(word) > 1]
    return layout.canonical("-".join(words)) if words else name.split("-")[0]


def _strides(layout: Layout, axes: tuple[str, ...]) -> dict[str, int]:
    """Return the stride of every axis of a view, which is that of its first part."""
    # Reversed, so that the first (fastest) part of an axis overwrites the slower ones.
    return {atom.axis: atom.stride for atom in reversed(_atoms(layout, axes))}


def _offsets(atoms: Iterable[Atom]) -> list[int]:
    """Return every sum of steps along these atoms, ascending. The atoms are given by ascending stride."""
    offsets = [0]
    for atom in atoms:
        if atom.size > 1:
            offsets = [step * atom.stride + offset for step in range(atom.size) for offset in offsets]
    return offsets


def _view_of(layout: Layout, name: str, words: list[str]) -> tuple[str, ...]:
    """Return the axes of the view that all `words` (axes or parts) belong to. Raise if there is no such view."""
    axis_of = {axis: axis for axis in (*AXES, *EXPERT_WORDS.values(), REPLICAS)}
    axis_of |= {part: axis for axis, parts in layout.parts for part, _ in parts}
    for word in words:
        if word not in axis_of:
            whole = "" if name == word else f" in '{name}'"
            hint = nearest(name, SPECIAL_GROUPS) or nearest(word, axis_of)
            raise UserError(
                f"unknown group '{word}'{whole}{hint}: use one of {', '.join(axis_of)}, "
                f"several joined by '-', or {', '.join(SPECIAL_GROUPS)}"
            )
    axes = [axis_of[word] for word in words]
    expert = [word for word, axis in zip(words, axes, strict=True) if axis in ONLY_EXPERTS]
    dense = [word for word, axis in zip(words, axes, strict=True) if axis in ONLY_DENSE]
    if expert and dense:
        raise UserError(
            f"group '{name}' mixes {dense[0]} of the dense view with {expert[0]} of the expert view: "
            "combine ep with tp, pp and edp only"
        )
    return EXPERT_AXES if expert else DENSE_AXES


@lru_cache(maxsize=1024)
def _product(layout: Layout, name: str) -> AxisProduct:
    words = name.split("-")
    axes = _view_of(layout, name, words)
    # "tp-ep" means the tensor-parallel ranks of experts.
    words = ["etp" if word == "tp" and axes == EXPERT_AXES else word for word in words]
    atoms = _atoms(layout, axes)
    inside = tuple(atom for atom in atoms if atom.name in words or atom.axis in words)
    for atom in inside:
        if sum(word in (atom.name, atom.axis) for word in words) > 1:
            raise UserError(f"group '{name}' names {atom.axis} twice: name an axis, or parts of it, once")
    between = tuple(atom for atom in atoms if atom not in inside)
    return AxisProduct(inside, between, tuple(_offsets(inside)))


def _coordinate(layout: Layout, axes: tuple[str, ...], rank: int) -> dict[str, int]:
    strides = _strides(layout, axes)
    all_axes = (*axes, REPLICAS) if layout.replicas > 1 else axes
    coordinate = {axis: rank // strides[axis] % layout.axis_size(axis) for axis in all_axes}
    return coordinate | {atom.name: atom.at(rank) for atom in _atoms(layout, axes)}


def _holders_of(layout: Layout, name: str, stages: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks of one pipeline that hold the same parameters, as tied word embeddings are held by the first
    and the last stage."""
    return tuple(sorted({stages[at] for at in layout.holders[name]}))


def node_parts(layout: Layout, key: str = "zero.shard_group=node") -> Parts:
    """Return the parts of dp for weights that are sharded inside a node and replicated across nodes.

    `key` is the config setting that asked for it, for the error message.
    """
    ranks = layout.group("dp", 0)
    # Members of the first group on the first node. All groups must be cut into such runs without crossing a node.
    inside = sum(rank < (layout.node_size or layout.world) for rank in ranks)
    neighbours = (group[at : at + inside] for group in layout.groups("dp") for at in range(0, len(ranks), inside))
    uneven = any(map(layout.crosses_node, neighbours))
    if inside == len(ranks) and not uneven:
        return ()
    if inside == 1 or len(ranks) % inside or uneven:
        raise UserError(
            f"{key}: a node of layout.node_size={layout.node_size} holds {inside} of the {len(ranks)} data-parallel "
            f"ranks, which divides nothing evenly: leave {key.split('=')[0]} out, or lower layout.tp or pp"
        )
    return (("dp", ((SHARD, inside), (REPLICA, len(ranks) // inside))),)


def exchange_parts(layout: Layout) -> Parts:
    """Return the parts of ep for rows that are exchanged inside a node first and then between nodes.

    Returns () if all ep groups are on one node, have one rank per node, or differ in their ranks per node.
    """
    node = layout.node_size or layout.world
    counts = {count for group in layout.groups("ep") for count in Counter(rank // node for rank in group).values()}
    per_node = counts.pop()
    # If the groups have different numbers of ranks per node, further counts remain in the set.
    if counts or not 1 < per_node < layout.ep:
        return ()
    return (("ep", ((EP_NODE, per_node), (EP_ACROSS, layout.ep // per_node))),)


def neighbours_on_node(ranks: Sequence[int], node_size: int) -> int:
    """Return the number of neighbouring ranks of a group per node, or 1 if nodes hold different numbers of them."""
    nodes = [rank // node_size for rank in ranks]
    first = nodes.count(nodes[0])
    return first if nodes == [nodes[at - at % first] for at in range(len(nodes))] and len(nodes) % first == 0 else 1


def mesh_width(size: int) -> int:
    """Return the shorter side of a mesh that is as square as `size` allows; 1 if `size` is prime."""
    return next(width for width in range(isqrt(size), 0, -1) if size % width == 0)
