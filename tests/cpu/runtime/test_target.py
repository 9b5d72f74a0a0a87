"""Target: from a device, or named without one."""

import torch

from fa4_inductor.runtime.target import target_for


def test_cpu():
    target = target_for(torch.device("cpu"))
    assert (target.device_type, target.arch) == ("cpu", "cpu") and not target.is_hopper


def test_a_named_architecture_needs_no_gpu():
    target = target_for("cpu", arch="sm_90a")
    assert target.device_type == "cuda" and target.is_hopper and target.sm_count == 132
    assert not target_for("cuda", arch="sm_100a").is_hopper
