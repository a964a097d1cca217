"""AdamW with a part of its state in host memory: it steps that part there while the device steps the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mimo.hooks import RunError
from mimo.optimizer import GRADIENT_SCALE
from mimo.optimizer.runtime import fused_adamw, load_in_place, zeros_like
from mimo.topology.meshes import local
from mimo_optimizer_hybrid._balance import balanced_fraction
from mimo_optimizer_hybrid._division import Division
from mimo_optimizer_hybrid._host_half import HostHalf
from mimo_optimizer_hybrid._limits import BUCKET_BYTES, STAGING_BYTES, check_fraction
from mimo_optimizer_hybrid._memory import HeldBytes, ask_alone
from mimo_optimizer_hybrid._parameters import Parameters, group_parameters
from mimo_optimizer_hybrid._tensors import Settings, mean_numbers

__all__ = ["HeldBytes", "HybridDeviceOptimizer"]


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) over fp32 parameters, plain tensors and DTensors, by their local parts.

    The last of the parameters, about ``fraction`` of all numbers, are held by the host in buckets: an fp32 copy of
    their values and both moments. It steps them on a thread of its own, with the same kernel and to the same bits as
    `mimo.optimizer.runtime.LocalAdamW` would, while the device steps the others. State is there from the start, named
    and shaped as that one's: ``exp_avg`` and ``exp_avg_sq`` like the parameter, ``step`` a scalar tensor.

    Used as any optimizer, `step` returns when all is done. With ``overlaps`` it returns while the thread still works:
    then whoever reads a parameter calls `wait` or `synchronize` before, and `gradients_final` when gradients need not
    wait for `step` to be copied.

    New values must be written to parameters by torch's own operations on them (or on ``detach()`` of a plain tensor):
    the host sees those and reads them anew. After others, call `distrust`.

    Args:
        parameters: as any optimizer of torch takes them, in the order in which a forward pass needs them: tensors,
            pairs of name and tensor, a mapping of names to tensors, or groups, dicts whose ``params`` are such and
            whose other keys are settings of the group's own. A parameter without a name is called by its number among
            all of them, ``"0"``.
        fraction: from 0 to 1, or ``auto``: as much as makes both halves take equally long, by trial steps on memory of
            their own.
        bucket_bytes: of fp32 parameters that are waited for together; fewer for a small model.
        staging_bytes: host memory for gradients on their way, at least two buckets.
        lr: learning rate.
        betas: how much of the averages of gradients and of their squares stays at each step.
        eps: is added to the root of the latter.
        weight_decay: times the learning rate.
        kept: of the first parameters, those that the host holds only if it holds all, by ``fraction`` = 1.
        overlaps: whether `step` returns early.
        threads: on which the host steps; None for as many as torch computes with where the optimizer is made.
        ask: receives the bytes of host memory that are about to be taken, and may refuse.

    Raises:
        ConfigError: the fraction is out of range, or host memory cannot hold its share; nothing is allocated then.
        RunError: a parameter is not in fp32, or not on the same device as the others.
        TypeError: something other than a tensor is among the parameters.
        ValueError: a parameter is there twice, or two have one name.

    Attributes:
        fraction: share of all numbers that the host holds.
        promised: bytes of state and staging as computed before anything was allocated.
        overlaps: whether `step` returns early.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        fraction: float | Literal["auto"] = 1.0,
        bucket_bytes: int = BUCKET_BYTES,
        staging_bytes: int = STAGING_BYTES,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        kept: int = 0,
        overlaps: bool = False,
        threads: int | None = None,
        ask: Callable[[int], None] = ask_alone,
    ) -> None:
        check_fraction(fraction)
        grouped = group_parameters(parameters)
        device = device_of(grouped.named)
        values = list(grouped.named.values())
        threads = threads or torch.get_num_threads()
        if fraction == "auto":
            fraction = balanced_fraction(device, count_numbers(values), threads=threads)
        division = divide(
            values, fraction=fraction, bucket_bytes=bucket_bytes, staging_bytes=staging_bytes, kept=kept, device=device
        )
        begin = division.begin
        self.fraction = division.fraction
        self.promised = division.bytes
        ask(self.promised.host)
        super().__init__(
            grouped.groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, GRADIENT_SCALE: 1.0}
        )
        self._device = device
        self.overlaps = overlaps
        for parameter in values[:begin]:
            self.state[parameter] = {
                "step": torch.zeros((), device=device),
                "exp_avg": zeros_like(parameter),
                "exp_avg_sq": zeros_like(parameter),
            }
        self._host = HostHalf(
            values[begin:],
            pieces=division.pieces,
            most=division.most,
            staging=division.staging,
            device=device,
            threads=threads,
        )
        with torch.no_grad():
            for held in self._host.held:
                self.state[held.parameter] = held.state()
        self._index = {name: index for index, name in enumerate(list(grouped.named)[begin:])}
        self._index_of = {parameter: index for index, parameter in enumerate(values[begin:])}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take a group with settings of its own, of parameters that the optimizer was made of.

        They are to be taken out of the group that holds them first, by its ``params``: torch refuses a parameter that
        is in two.

        Raises:
            RunError: others are among them.
        """
        if self.state and any(parameter not in self.state for parameter in param_group["params"]):
            raise RunError(
                "HybridDeviceOptimizer.add_param_group",
                expected="parameters that it was made of",
                got="others, for which no memory was asked",
                fix="Make it of all parameters at once.",
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; the host's own on its thread.

        Raises:
            RunError: that thread has failed, in this step or an earlier one.
        """
        assert closure is None, "closures are not supported"
        self.wait_all()
        settings = [Settings.of(group) for group in self.param_groups]
        groups = [group["params"] for group in self.param_groups]
        self._host.start(
            {
                self._index_of[parameter]: own
                for own, parameters in zip(settings, groups, strict=True)
                for parameter in parameters
                if parameter in self._index_of
            }
        )
        for own, parameters in zip(settings, groups, strict=True):
            self._step_device([one for one in parameters if one not in self._index_of], own)
        if not self.overlaps:
            self.wait_all()

    def _step_device(self, parameters: list[Tensor], settings: Settings) -> None:
        live = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        states = [self.state[parameter] for parameter, _ in live]
        if states:
            torch._foreach_add_([state["step"] for state in states], 1)  # as torch.optim does
        fused_adamw(
            [local(parameter) for parameter, _ in live],
            [local(gradient) for _, gradient in live],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
            settings.group,
        )

    @torch.no_grad()
    def gradients_final(self, names: Iterable[str]) -> None:
        """Copy gradients of these parameters down beside what else is computed; names of others are left out.

        They may still be multiplied, by `mimo.optimizer.GRADIENT_SCALE` of their group. One that has been written to
        or replaced by the time of `step` is copied again there.

        Raises:
            RunError: the thread has failed.
        """
        self._host.stage([self._index[name] for name in names if name in self._index])

    def waiter(self, names: Iterable[str]) -> Callable[[], None]:
        """Return a function that waits until these parameters have the values of the last step.

        What is waited for are their buckets. On an accelerator it is what the device is given next that waits. It
        raises RunError where the thread has failed.
        """
        buckets = self._host.buckets_of(self._index[name] for name in names if name in self._index)
        return lambda: self._host.wait(buckets)

    def wait(self, names: Iterable[str]) -> None:
        """Wait as `waiter` says."""
        self.waiter(names)()

    def wait_all(self) -> None:
        """Wait until the last step is done, on the host and on its way up.

        Raises:
            RunError: the thread has failed.
        """
        self._host.wait_all()

    @property
    def is_idle(self) -> bool:
        """Whether the thread has nothing to do."""
        return self._host.is_idle

    def distrust(self) -> None:
        """Let the host read the values of all its parameters anew at the next step."""
        self._host.distrust()

    def synchronize(self) -> None:
        """Wait for all, before parameters or state are read or written from outside.

        The host no longer takes for granted that parameters have the values that it gave them.

        Raises:
            RunError: the thread has failed.
        """
        self.wait_all()
        self.distrust()

    @property
    def held(self) -> HeldBytes:
        """Bytes of state and staging, measured: of the memory that tensors really have."""
        device = [
            value
            for parameter, states in self.state.items()
            if parameter not in self._index_of
            for value in states.values()
        ]
        with torch.no_grad():
            return HeldBytes(
                host=self._host.bytes, device=sum(local(value).untyped_storage().nbytes() for value in device)
            )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's own signature
        """Forget gradients; those that are overwritten have been read by then."""
        if not set_to_none:
            self.wait_all()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, as of the last step."""
        self.wait_all()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, this one's or another AdamW's, into the memory that is there.

        Raises:
            RunError: it is of other parameters.
        """
        self.synchronize()
        load_in_place(self, state_dict)


def count_numbers(parameters: Iterable[Tensor]) -> int:
    """Return how many numbers this rank holds of parameters."""
    with torch.no_grad():
        return sum(local(parameter).numel() for parameter in parameters)


def divide(
    parameters: Sequence[Tensor],
    *,
    fraction: float,
    bucket_bytes: int,
    staging_bytes: int,
    kept: int,
    device: torch.device,
) -> Division:
    """Divide parameters between host and device, as `HybridDeviceOptimizer` does with these settings.

    Ranks that hold copies of one parameter, or pieces of any, divide the same way: by what a rank holds on average.
    """
    with torch.no_grad():
        sizes = [local(parameter).numel() for parameter in parameters]
        shares = [mean_numbers(parameter) for parameter in parameters]
    return Division.of(
        sizes,
        fraction=fraction,
        bucket_bytes=bucket_bytes,
        staging_bytes=staging_bytes,
        shares=shares,
        kept=kept,
        pins=device.type != "cpu",
    )


def device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    """Return the one device of all parameters.

    Raises:
        RunError: there are several, or one parameter is not in fp32.
    """
    devices = {parameter.device for parameter in parameters.values()}
    wrong = {name: parameter.dtype for name, parameter in parameters.items() if parameter.dtype != torch.float32}
    if wrong or len(devices) > 1:
        name, dtype = next(iter(wrong.items()), ("", None))
        raise RunError(
            f"HybridDeviceOptimizer: {name}" if wrong else "HybridDeviceOptimizer",
            expected="an fp32 parameter" if wrong else "parameters on one device",
            got=str(dtype) if wrong else ", ".join(sorted(map(str, devices))),
            fix="Keep weights in fp32 and let layers compute in less: run.precision." if wrong else "Make one of each.",
        )
    return next(iter(devices), torch.device("cpu"))
