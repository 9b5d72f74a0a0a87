"""The backward kernel against fp64 on random shapes, dtypes and programs, some of whose captured tensors learn."""

import bwd_sweep
import fwd_sweep


def test_random_sweep():
    checked, failures = fwd_sweep.sweep(bwd_sweep.jobs(), 12, 10, 1, bwd_sweep.run_job)
    assert checked >= 300
    assert not failures, "\n".join(failures[:5])
