"""CuTe-DSL kernels for sm_90a. Only this package imports cutlass."""
