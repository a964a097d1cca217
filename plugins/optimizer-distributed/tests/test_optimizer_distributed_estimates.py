"""What spreading over lanes holds and sends, estimated from shapes."""

from __future__ import annotations

import pytest

from mimo.optimizer.estimates import Lanes, Numbers, ParameterShape, PartShapes, SentBytes
from mimo_optimizer_distributed import DistributedConfig
from mimo_optimizer_distributed.estimates import laid, piece_of, sent
from mimo_optimizer_distributed.sharding import Shard

STEM = ParameterShape(name="m.stem", shape=(5, 2))
LAYERS = tuple(
    ParameterShape(name=f"m.{number}", shape=(4, size), layer=number) for number, size in enumerate((3, 9, 1))
)
FROZEN = ParameterShape(name="m.frozen", shape=(2,), trained=False)
SCALAR = ParameterShape(name="m.scalar", shape=())
PART = PartShapes(parameters=(STEM, *LAYERS, FROZEN, SCALAR), lanes=Lanes(size=2, index=1))
PIECES = 4 * (3 * 2 + 2 * 3 + 2 * 9 + 2 * 1 + 1 + 1)  # the stem's are padded; a scalar stays whole
WHOLE = 4 * (6 * 2 + 4 * 3 + 4 * 9 + 4 * 1 + 2)
TRAINED = 4 * (5 * 2 + 4 * 3 + 4 * 9 + 4 * 1)


def test_pieces_are_cut_as_torch_cuts_chunks() -> None:
    """From left to right: later ones are shorter, or empty."""
    four = [piece_of(STEM, Lanes(size=4, index=index)) for index in range(4)]
    assert [piece.shape for piece in four] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert {piece.mean_numbers for piece in four} == {2.5}
    assert piece_of(SCALAR, Lanes(size=4)) == SCALAR


@pytest.mark.parametrize(
    ("shard", "gathered", "inside", "gradients", "gradients_inside"),
    [
        ("optimizer", WHOLE, 0, TRAINED + 4, 0),
        ("gradients", WHOLE, 0, PIECES - 4, TRAINED),
        ("full", 0, 4 * (6 * 2 + 2 + 4 * 3 + 4 * 9), PIECES - 4, TRAINED),
    ],
)
def test_each_way_to_spread_keeps_less(
    shard: Shard, gathered: int, inside: int, gradients: int, gradients_inside: int
) -> None:
    """Whole gradients are a backward's only where it reduces them; with ``full``, two neighbouring layers are whole."""
    estimate = laid(PART, DistributedConfig(shard=shard))
    assert estimate.weights == PIECES
    assert (estimate.gathered, estimate.gathered_inside) == (gathered, inside)
    assert (estimate.gradients, estimate.gradients_inside) == (gradients, gradients_inside)
    assert [piece.shape for piece in estimate.pieces] == [(2, 2), (2, 3), (2, 9), (2, 1), ()]


def test_one_layer_is_whole_at_a_time_where_none_is_gathered_ahead() -> None:
    """The largest of them, and what no layer holds alone."""
    estimate = laid(PART, DistributedConfig(shard="full", overlap_param_gather=False))
    assert estimate.gathered_inside == 4 * (6 * 2 + 2 + 4 * 9)


def test_a_stage_may_have_one_layer_or_none() -> None:
    """Then there is no neighbour."""
    alone = PartShapes(parameters=(STEM, LAYERS[1]), lanes=Lanes(size=2))
    assert laid(alone, DistributedConfig(shard="full")).gathered_inside == 4 * (6 * 2 + 4 * 9)
    none = PartShapes(parameters=(STEM,), lanes=Lanes(size=2))
    assert laid(none, DistributedConfig(shard="full")).gathered_inside == 4 * 6 * 2


def test_nothing_is_gathered_where_nothing_is_spread() -> None:
    """Unless layers compute in less than fp32: one lane alone then has copies, and adds to gradients of theirs."""
    alone = PartShapes(parameters=(STEM,), lanes=Lanes(copies=2))
    estimate = laid(alone, DistributedConfig(shard="full"))
    assert (estimate.weights, estimate.gathered, estimate.gathered_inside, estimate.gradients) == (40, 0, 0, 40)
    half = laid(PartShapes(parameters=(STEM,), lanes=Lanes(copies=2), number_bytes=2), DistributedConfig(shard="full"))
    assert (half.weights, half.gathered, half.gathered_inside) == (40, 20, 0)
    assert (half.gradients, half.gradients_inside) == (40, 20)


def test_experts_are_cut_over_their_own_lanes() -> None:
    """Which may be one; what other code changes is whole on each."""
    experts = ParameterShape(name="m.experts", shape=(2, 3, 3), experts=True, layer=0)
    bias = ParameterShape(name="m.bias", shape=(4,), trained=False, whole=True)
    estimate = laid(PartShapes(parameters=(experts, bias, STEM), lanes=Lanes(size=2)), DistributedConfig())
    assert estimate.weights == 4 * (18 + 4 + 6)
    assert estimate.gathered == 4 * (18 + 12)
    assert [piece.shape for piece in estimate.pieces] == [(2, 3, 3), (3, 2)]


def test_a_lane_alone_gathers_nothing_ahead() -> None:
    """Experts of which each lane has its own are copied when their layer begins."""
    layers = (
        *(ParameterShape(name=f"m.{layer}.norm", shape=(2,), layer=layer) for layer in range(2)),
        *(ParameterShape(name=f"m.{layer}.up", shape=(1, 5), layer=layer, experts=True) for layer in range(2)),
    )
    estimate = laid(PartShapes(parameters=layers, lanes=Lanes(size=2)), DistributedConfig(shard="full"))
    assert estimate.gathered_inside == 4 * (2 + 5 + 2)


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        ("optimizer", SentBytes(step=300 + 150)),
        ("gradients", SentBytes(step=150, grad_accumulation=300)),
        ("full", SentBytes(forward=225, backward=225, grad_accumulation=300)),
    ],
)
def test_each_way_to_spread_sends_at_its_own_time(shard: Shard, expected: SentBytes) -> None:
    """Gradients in fp32, parameters in what layers compute in; frozen ones only where they are let go of."""
    numbers = Numbers(trained=100, all=150, number_bytes=2, lanes=Lanes(size=4))
    assert sent(numbers, DistributedConfig(shard=shard)) == expected


def test_copies_are_summed_once_a_step() -> None:
    """The pieces of two copies, beside what each has sent."""
    numbers = Numbers(trained=100, all=100, lanes=Lanes(size=4, copies=2))
    assert sent(numbers, DistributedConfig(shard="full")).step == 2 * (2 - 1) / 2 * 4 * 25
