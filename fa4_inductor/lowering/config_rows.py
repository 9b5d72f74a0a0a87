"""Measured tile configurations of the sm_90a forward kernel, written by `python benchmarks/tune_configs.py --write`.

Keys: what the row is for (`config_table.KINDS`), head_dim and head_dim_v as padded in shared memory.
"""

GPU = "NVIDIA H200"
DATE = "2026-12-01"
ROWS: dict[tuple[str, int, int], dict[str, int | bool]] = {
    ("loads", 64, 64): {"num_consumers": 2, "tile_n": 128, "num_stages": 4, "order_warpgroups": True},
    ("loads", 96, 96): {"num_consumers": 2, "tile_n": 128, "num_stages": 2, "order_warpgroups": False},
    ("loads", 128, 128): {"num_consumers": 2, "tile_n": 128, "num_stages": 2, "order_warpgroups": True},
    ("loads", 192, 128): {"num_consumers": 2, "tile_n": 128, "num_stages": 2, "order_warpgroups": False},
    ("loads", 192, 192): {"num_consumers": 2, "tile_n": 64, "num_stages": 2, "order_warpgroups": False},
    ("loads", 256, 256): {"num_consumers": 2, "tile_n": 64, "num_stages": 2, "order_warpgroups": False},
    ("no loads", 64, 64): {
        "num_consumers": 2, "tile_n": 128, "num_stages": 4, "order_warpgroups": False, "q_in_registers": True,
    },
    ("no loads", 128, 128): {
        "num_consumers": 2, "tile_n": 128, "num_stages": 2, "order_warpgroups": False, "q_in_registers": True,
    },
    ("lean", 64, 64): {"num_consumers": 3, "tile_n": 128, "num_stages": 2, "order_warpgroups": True},
    ("bounded", 128, 128): {
        "num_consumers": 2, "tile_n": 128, "num_stages": 2, "order_warpgroups": True, "q_in_registers": True,
        "polynomial_exp2": 6,
    },
    ("dense", 64, 64): {
        "num_consumers": 2, "tile_n": 128, "num_stages": 3, "order_warpgroups": True, "q_in_registers": True,
    },
    ("short dense", 128, 128): {
        "num_consumers": 2, "tile_n": 64, "num_stages": 2, "order_warpgroups": False, "q_in_registers": True,
    },
}
