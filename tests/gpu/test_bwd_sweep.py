"""The backward kernel against fp64 on random shapes, dtypes and programs, some of whose captured tensors learn."""

import bwd_sweep


def test_random_sweep():
    checked, failures = bwd_sweep.sweep(bwd_sweep.jobs(), workers=12, per_job=10, seed=1)
    assert checked >= 300
    assert not failures, "\n".join(failures[:5])
