"""Which names a checkpoint may lack and which may be left, from names alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mimo.trainer.config.settings import LoadSettings
from mimo.trainer.resume.match_keys import Fit, fit
from mimo.trainer.resume.renaming import Renaming

ADAM = ("exp_avg", "exp_avg_sq", "step")
BOOKKEEPING = {"progress.step", "progress.seed", "settings.language"}


def model(*weights: str) -> set[str]:
    """Return the names of weights."""
    return set(weights)


def states(*weights: str, keys: Iterable[str] = ADAM) -> set[str]:
    """Return the names of their optimizer states."""
    return {f"optimizer.{weight}.{key}" for weight in weights for key in keys}


def decide(
    asked: set[str], held: set[str], *, finetunes: bool = False, untaken: Any = (), trained: Any = (), **take: Any
) -> Fit:
    """Decide about a run of vision and language, and a checkpoint with the modules that it names."""
    saved = {name.partition(".")[0] for name in held} - {"optimizer", "keeper", "dice"}
    return fit(
        asked,
        held | BOOKKEEPING,
        modules=("vision", "language"),
        saved=saved,
        take=LoadSettings(**take),
        finetunes=finetunes,
        untaken=untaken,
        trained=trained,
    )


def test_the_same_names_need_nothing() -> None:
    """Only the run's own bookkeeping is read from the manifest instead."""
    names = model("vision.a", "language.b") | states("vision.a", "language.b")
    found = decide(names, names)
    assert (found.may_lack, set(found.may_leave), found.new, found.left) == ((), BOOKKEEPING, (), ())
    assert not found.problems


def test_states_begin_new_only_where_the_parameter_is_there_without_any() -> None:
    """A parameter that lacks one of its states is refused by whoever loads: it isn't among those that may."""
    asked = model("vision.a", "vision.b", "vision.c") | states("vision.a", "vision.b", "vision.c")
    held = model("vision.a", "vision.b") | states("vision.b", keys=ADAM[:2])
    found = decide(asked, held)
    assert set(found.may_lack) == states("vision.a")
    assert found.new == ("optimizer states of what was not trained in vision (3 entries)",)
    assert not found.problems


def test_states_are_left_only_where_the_parameter_is_here_and_has_none() -> None:
    """One more state than the optimizer here has is refused, as are those of a parameter that isn't here."""
    asked = model("vision.a", "vision.b") | states("vision.b")
    held = model("vision.a", "vision.b", "vision.c") | states("vision.a", "vision.c")
    held |= states("vision.b", keys=(*ADAM, "max_exp_avg_sq"))
    found = decide(asked, held)
    assert set(found.may_leave) == BOOKKEEPING | states("vision.a")
    assert found.left == ("optimizer states of what is not trained in vision (3 entries)",)


def test_states_go_with_parameters_that_are_named() -> None:
    """Whoever allows a weight to be lacking or left need not name its states too."""
    asked = model("vision.a", "language.b") | states("vision.a", "language.b")
    held = model("eye.a", "language.b") | states("eye.a", "language.b")
    found = decide(asked, held, may_lack=("vision.*",), may_leave=("eye.*",))
    assert set(found.may_lack) == {"vision.a", "vision.*"} | states("vision.a")
    assert set(found.may_leave) == {"eye.a", "eye.*"} | states("eye.a") | BOOKKEEPING
    assert (found.new, found.left) == (("weights of vision",), ("eye",))


def test_an_optimizer_with_other_states_is_a_problem() -> None:
    """It is reported once for each module, with what it needs and what there is."""
    weights = ("vision.a", "vision.b", "language.c")
    asked = model(*weights) | states("vision.a", "vision.b", keys=("momentum_buffer",)) | states("language.c")
    (problem,) = decide(asked, model(*weights) | states(*weights)).problems
    assert str(problem) == (
        "modules.vision.optimizer.plugin: expected one that goes on with the states that the checkpoint has for "
        "vision: exp_avg, exp_avg_sq, step, got one that needs momentum_buffer of 2 parameters. Set the plugin with "
        "which it was saved, or load.optimizer = false to begin all optimizer states new."
    )


def test_a_module_that_was_trained_has_states() -> None:
    """Without any the checkpoint was stripped of them; a loss scale is none, and where none are needed none lack."""
    weights = model("eye.a", "eye.b", "language.c")
    asked = model("vision.a", "vision.b", "language.c") | states("vision.a", "vision.b", "language.c")
    held = weights | states("language.c") | {"optimizer.loss_scale.scale"}
    rename = {"vision": "eye"}
    (problem,) = decide(asked, held, rename=rename, trained=("eye", "language")).problems
    assert str(problem) == (
        "modules.vision: expected optimizer states in the checkpoint, as eye was trained, got none. Name a checkpoint "
        "that has them, or set load.optimizer = false to begin all optimizer states new."
    )
    assert not decide(asked, held, rename=rename, trained=("language",)).problems
    assert not decide(asked, held | states("eye.a"), rename=rename, trained=("eye", "language")).problems
    frozen = asked - states("vision.a", "vision.b")
    assert not decide(frozen, held, rename=rename, trained=("eye", "language")).problems


def test_a_part_is_found_where_the_checkpoint_has_any_name_of_it() -> None:
    """Names of other ranks count, and those that are renamed."""
    asked = {"keeper.rank_0", "keeper.rank_1", "dice.x", "other.x"}
    found = decide(asked, {"keeper.rank_0", "die.x"}, rename={"dice": "die"}, may_lack=("*",))
    assert found.found == {"keeper", "dice"}


def test_a_loss_scale_begins_new_or_is_left() -> None:
    """Another precision needs none, or has none to take."""
    scale = {"optimizer.loss_scale.scale", "optimizer.loss_scale.good_steps"}
    weights = model("language.a") | states("language.a")
    begins, ends = decide(weights | scale, weights), decide(weights, weights | scale)
    assert (set(begins.may_lack), begins.new) == (scale, ("loss scale (2 entries)",))
    assert (set(ends.may_leave), ends.left) == (BOOKKEEPING | scale, ("loss scale (2 entries)",))


def test_without_optimizer_states_all_are_left() -> None:
    """Those of parameters that are gone, too."""
    held = model("language.a") | states("language.a", "language.b") | {"optimizer.loss_scale.scale"}
    found = decide(model("language.a"), held, optimizer=False)
    assert set(found.may_leave) == held - {"language.a"} | BOOKKEEPING
    assert found.left == ("all optimizer states (7 entries)",)


def test_parts_of_plugins_are_named_or_refused() -> None:
    """One that is not taken may be left; one that is new or gone only where settings say so."""
    found = decide({"keeper.count"}, {"dice.generator", "other.x"}, untaken=("dice",))
    assert (found.may_lack, set(found.may_leave)) == ((), {"dice.generator"} | BOOKKEEPING)
    allowed = decide({"keeper.count"}, {"other.x"}, may_lack=("keeper.*",), may_leave=("other.*",))
    assert set(allowed.may_lack) == {"keeper.count", "keeper.*"}
    assert set(allowed.may_leave) == {"other.x", "other.*"} | BOOKKEEPING
    assert (allowed.new, allowed.left) == (("keeper",), ("other",))


def test_finetuning_takes_weights_of_shared_modules_alone() -> None:
    """What a module lacks itself is refused: only whole modules begin with initial weights or are left."""
    held = model("eye.a", "language.b", "language.d") | states("eye.a", "language.b") | {"keeper.count"}
    found = decide(model("vision.a", "language.b", "language.c"), held, finetunes=True)
    assert found.may_lack == ("vision.a",)
    assert set(found.may_leave) == held - {"language.b", "language.d"} | BOOKKEEPING
    assert (found.new, found.left) == (("weights of vision",), ("eye",))


def test_states_are_renamed_with_their_parameters() -> None:
    """Where any are asked for; the longest beginning of whole keys counts."""
    rename = {"vision": "eye", "vision.out": "head"}
    asked = model("vision.a", "vision.out.b", "visions.c") | states("vision.a", "vision.out.b")
    found = decide(asked, model("eye.a", "head.b", "visions.c") | states("eye.a"), rename=rename)
    assert found.rename == {"optimizer.vision": "optimizer.eye", "optimizer.vision.out": "optimizer.head", **rename}
    assert set(found.may_lack) == states("vision.out.b")
    renaming = Renaming.of(rename, model("vision.a"))
    assert renaming.prefixes == rename
    assert [renaming.there(name) for name in ("vision", "vision.a", "vision.out.b", "visions.c")] == [
        "eye",
        "eye.a",
        "head.b",
        "visions.c",
    ]
    assert renaming.modules_there("vision") == {"eye", "head"}
    assert Renaming({"head": "language.head"}).modules_there("head") == {"language"}
