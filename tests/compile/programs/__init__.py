"""Hand-written kernel programs: they pin the interface of docs/architecture.md and are the emitter's golden models.

AUX and NUM_SIZES, which the emitter keeps in the spec, say what the tests have to pass.
"""
