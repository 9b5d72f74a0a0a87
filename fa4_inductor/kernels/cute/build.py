"""Build the sm_90a forward attention kernel: the entry that the runtime calls.

    compiled = build_forward(program, dtype, head_dim, head_dim_v, group,
                             aux=(("uint8", 2), ("float32", 1)), num_sizes=1, need_lse=True, config=config)
    compiled(q, k, v, out, lse, v_mean, softmax_scale, aux, sizes)        # on the current CUDA stream

One compiled function serves every batch size, every number of heads with that group, every length and every stride.

Call signature of `compiled` (TVM-FFI; torch tensors are passed as they are):
    q       (B, Hq, Sq, D)   bf16/fp16; innermost stride 1, other strides and the address multiples of 16 bytes
    k       (B or 1, Hkv, Sk, D), v (B or 1, Hkv, Sk, Dv): same rules; Hq == group * Hkv; Sk >= 1
    out     (B, Hq, Sq, Dv)  same dtype and rules (BSHD memory: a transposed view of a contiguous (B, Sq, Hq, Dv))
    lse     (B, Hq, Sq) float32, any strides; None iff need_lse is False
    v_mean  (B or 1, Hkv, Dv) float32, the mean of v over all Sk keys; None unless needs_v_mean(program)
    softmax_scale  float > 0 for PLAIN programs, any float otherwise
    aux     tuple of tensors of the dtypes and ranks given (bool tensors are passed as their uint8 view; any strides,
            naturally aligned); an empty tuple if there are none
    sizes   tuple of int (int32), an empty tuple if there are none
Not launched for B * Hq * Sq == 0 or Sk == 0: the host fills out and lse in those cases.
"""
