"""Learning rates as functions of the step."""

import pytest

from mimo.hooks import ConfigError
from mimo.optimizer import LearningRate


def test_optimizer_cosine_matches_the_reference_recipe() -> None:
    """From 2e-4 to 2e-6 by a cosine over 10 steps without warm-up: 1.59e-4, 1.32e-4, 1.01e-4 at steps 3, 4, 5."""
    rate = LearningRate(lr=2e-4, lr_min=2e-6, lr_schedule="cosine", lr_decay_steps=10)
    assert [f"{rate.at(step):.2e}" for step in (3, 4, 5, 10, 11)] == [
        "1.59e-04",
        "1.32e-04",
        "1.01e-04",
        "2.00e-06",
        "2.00e-06",
    ]


def test_optimizer_warm_up_climbs_to_the_full_rate() -> None:
    """Update k of w warm-up steps uses k/w of the rate; a line then falls to the lowest at the last step."""
    rate = LearningRate(lr=1.0, lr_min=0.2, lr_schedule="linear", lr_warmup_steps=4, lr_decay_steps=8)
    assert [rate.at(step) for step in range(1, 10)] == pytest.approx([0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_optimizer_stays_at_the_full_rate_before_it_falls() -> None:
    """Warm-up, stable, decay: from step 2 to step 4 it is the full rate."""
    rate = LearningRate(lr=1.0, lr_schedule="linear", lr_warmup_steps=2, lr_stable_steps=2, lr_decay_steps=8)
    assert [rate.at(step) for step in range(1, 10)] == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])


def test_optimizer_a_schedule_may_begin_anew() -> None:
    """Warm-up and the steps at the full rate count from there, and it ends at the same step of the run."""
    rate = LearningRate(lr=1.0, lr_schedule="linear", lr_warmup_steps=2, lr_stable_steps=1, lr_decay_steps=17)
    rates = [rate.at(step, begun=10) for step in (11, 12, 13, 14, 15, 16, 17, 18)]
    assert rates == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    rate.check(begun=13)
    with pytest.raises(ConfigError) as error:
        rate.check(begun=14)
    assert str(error.value) == (
        "optimizer.lr_decay_steps: expected more than 14 steps before it began + lr_warmup_steps + lr_stable_steps = "
        "17, got 17. It is the step at which lr_min is reached; 0 is run.steps."
    )
    assert LearningRate(lr=0.5, lr_warmup_steps=2).at(11, begun=10) == 0.25


def test_optimizer_constant_stays() -> None:
    """Without a schedule the rate stays after warm-up."""
    rate = LearningRate(lr=0.5, lr_warmup_steps=2)
    assert [rate.at(step) for step in (1, 2, 3, 1000)] == [0.25, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lr": -1.0}, r"optimizer\.lr: expected a finite number of 0 or more, got -1\.0"),
        ({"lr": float("nan")}, r"optimizer\.lr: .* got nan"),
        ({"lr_schedule": "cosin"}, r"optimizer\.lr_schedule: expected one of constant, linear, cosine, got 'cosin'"),
        (
            {"lr_schedule": "cosine", "lr_warmup_steps": 5, "lr_decay_steps": 5},
            r"optimizer\.lr_decay_steps: expected more than lr_warmup_steps = 5, got 5",
        ),
        (
            {"lr_schedule": "cosine", "lr_warmup_steps": 2, "lr_stable_steps": 3, "lr_decay_steps": 5},
            r"optimizer\.lr_decay_steps: expected more than lr_warmup_steps \+ lr_stable_steps = 5, got 5",
        ),
        (
            {"lr_stable_steps": 3},
            r"optimizer\.lr_stable_steps: expected 0, as lr_schedule 'constant' never falls, got 3\. Leave it out, or",
        ),
        (
            {"lr": 0.1, "lr_min": 0.2, "lr_schedule": "linear", "lr_decay_steps": 5},
            r"optimizer\.lr_min: expected at most lr = 0\.1, got 0\.2\. Set it lower, or lr higher\.$",
        ),
        (
            {"lr_min": 1e-5},
            r"optimizer\.lr_min: expected 0, as lr_schedule 'constant' never falls, got 1e-05\. Leave it out, or set l",
        ),
        (
            {"lr_decay_steps": 5},
            r"optimizer\.lr_decay_steps: expected 0, as lr_schedule 'constant' never falls, got 5\. Leave it out, or ",
        ),
        ({"lr": -1.0, "where": "modules.vision.optimizer"}, r"modules\.vision\.optimizer\.lr: "),
    ],
)
def test_optimizer_wrong_rates_are_refused_by_path(values: dict[str, object], text: str) -> None:
    """Each wrong value is refused with its setting's path."""
    with pytest.raises(ConfigError, match=text):
        LearningRate(**values)  # type: ignore[arg-type]
