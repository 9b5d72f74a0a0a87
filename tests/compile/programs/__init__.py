"""Hand-written kernel programs: they pin the interface of docs/architecture.md and are the emitter's golden models.

AUX and NUM_SIZES, which the emitter keeps in the spec, say what the tests have to pass.
"""

from types import ModuleType

_BYTES = {"bool": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}


def dense_bytes(program: ModuleType) -> int:
    """Bytes per score of the tiles that the program wants through TMA."""
    return sum(_BYTES[program.AUX[slot][0]] for slot in getattr(program, "DENSE", ()))
