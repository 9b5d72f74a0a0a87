"""The kernels against fp32 on random shapes, layouts, dtypes and programs: every job of fwd_sweep."""

import fwd_sweep
import pytest


@pytest.mark.parametrize("kernel", ["forward", "split"])
def test_random_sweep(kernel):
    jobs = fwd_sweep.jobs() if kernel == "forward" else fwd_sweep.split_jobs()
    checked, failures = fwd_sweep.sweep(jobs, workers=12, per_job=10, seed=1)
    assert checked >= 300
    assert not failures, "\n".join(failures[:5])
