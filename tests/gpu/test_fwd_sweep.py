"""The forward kernel against fp32 on random shapes, layouts, dtypes and programs: every job of fwd_sweep."""

import fwd_sweep


def test_random_sweep():
    checked, failures = fwd_sweep.sweep(workers=12, per_job=10, seed=1)
    assert checked >= 300
    assert not failures, "\n".join(failures[:5])
